"""``posttrain train``: train a model on a file, outside of a workspace's loop."""

from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
import yaml

from posttrain.cli.data import dataset_version
from posttrain.cli.shared import HERE, WorkspaceOption, console, opened
from posttrain.data.read import read
from posttrain.data.schema import concat
from posttrain.loop.config import CONFIG_FILE, read_yaml
from posttrain.models.sources import fetch, locate
from posttrain.store.errors import UserError
from posttrain.train.alone import METRICS, AloneConfig, train_alone


def train(
    model: Annotated[str | None, typer.Option(help="A folder, a .gguf file, a Hub id, smollm2-135m or tiny.")] = None,
    data: Annotated[str | None, typer.Option(help="A file of records, or a dataset version such as train@v2.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the trained model is written.")] = None,
    objective: Annotated[str | None, typer.Option(help="What is learned: sft, dpo and others.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML with `task`, `train`, `seed`; a posttrain.yaml will do.")
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(help="A setting, such as train.shuffle=false; may be repeated.")
    ] = None,
    fork: Annotated[bool, typer.Option("--fork", help="Go on although config or data have changed.")] = False,
    inspect: Annotated[int | None, typer.Option(min=1, help="Print so many examples as the model sees them.")] = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Train a model on a file or a dataset version; what was stopped goes on."""
    given = {"model": model, "data": data, "train.objective": objective}
    settings = _settings(config, {key: value for key, value in given.items() if value is not None}, set or [])
    source = locate(settings.model, Path())
    records = _records(settings, workspace)
    if inspect is not None:
        from posttrain.cli.inspect import print_examples

        print_examples(settings, source, records.slice(0, inspect))
        return
    if out is None:
        raise UserError("say where the model is to be written", where="--out")
    summary = train_alone(out, settings, records, lambda folder: _fetched(source, folder), fork=fork)
    console.print(
        f"{summary['steps']} steps, loss {summary['first_loss']:.4f} to {summary['last_loss']:.4f}\n"
        f"model: {out}   steps: {out / METRICS}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _settings(file: Path | None, given: dict[str, Any], changes: list[str]) -> AloneConfig:
    """The config file's values, then the options', then those that ``--set`` names."""
    values: dict[str, Any] = {}
    if file is not None:
        values = read_yaml(file)
        if isinstance(values.get("data"), dict):  # a whole posttrain.yaml
            values = {"columns": values["data"].get("columns")} | {
                key: values[key] for key in ("seed", "model", "task", "train") if key in values
            }
    for key, value in given.items():
        _put(values, key, value)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key:
            raise UserError(f"`{change}` is no setting", where="--set", fix="key=value, such as train.epochs=3")
        try:
            _put(values, key, yaml.safe_load(text))
        except yaml.YAMLError:
            raise UserError(f"`{text}` cannot be read as a value", where=f"--set {key}") from None
    for name in ("model", "data"):
        if name not in values:
            raise UserError(f"no {name} is named", where=f"--{name}")
    return AloneConfig.read(values, str(file or "--set"))


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise UserError(f"`{part}` is no section", where=f"--set {key}")
    values[last] = value


def _records(settings: AloneConfig, workspace: Path) -> pa.Table:
    path = Path(settings.data)
    if path.exists() or not (workspace / CONFIG_FILE).is_file():
        return concat(list(read(path, settings.columns, name=settings.data)))
    with opened(workspace, checked=False) as (store, _):
        return dataset_version(store, settings.data).records


def _fetched(source: str, folder: Path) -> Path:
    """A folder in Hugging Face layout: the model's own, or ``folder``, converted or downloaded once."""
    if Path(source).is_dir():
        return Path(source)
    if not (folder / "config.json").exists():
        fetch(source, folder)
    return folder


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(train)
