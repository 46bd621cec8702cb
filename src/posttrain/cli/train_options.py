"""Options that ``posttrain train`` and ``posttrain plan`` share: settings from a file and flags, and records."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from posttrain.cli.workspace import CURRENT_FOLDER, open_store, open_version
from posttrain.data.config import DataConfig
from posttrain.data.versions.leaks import training_records
from posttrain.data.versions.version import Version
from posttrain.loop.config import config_lines, read_config
from posttrain.loop.suites import measured_on
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.extensions import add_module_folder
from posttrain.store.hub import HUB_PREFIX
from posttrain.store.yaml_files import parse_yaml, read_yaml
from posttrain.train.api import read_files
from posttrain.train.objectives.registry import OBJECTIVES, objective_spec, with_name
from posttrain.train.standalone import TrainJobConfig

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="A folder, a .gguf file, a Hub id, smollm2-135m, or tiny: a small untrained model to try things with."
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A file of records (repeat for several), hub:OWNER/NAME:SPLIT, or a dataset version of the workspace, "
        "such as train@v2."
    ),
]
_OPTIONS = {"model": "--model", "data": "--data", "train.objective": "--objective"}
"""The options that are values of keys, which `--set` takes too."""

ObjectiveOption = Annotated[
    str | None, typer.Option(help=f"Objective: {', '.join(OBJECTIVES.builtin)}; sft by default.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with `task`, `train` and `seed`, or a whole posttrain.yaml. Paths are relative to its folder."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(help="A setting, such as train.shuffle=false; repeatable; `posttrain config keys train` lists them."),
]


def read_settings(
    file: Path | None, options: dict[str, Any], changes: list[str], *, plan: bool = False
) -> TrainJobConfig:
    """Merges the config file, then the options, then ``--set``; makes paths absolute.

    Args:
        file: YAML, or None.
        options: command-line options by key; None if not set.
        changes: ``key=value``.
        plan: allow a missing ``data``, which becomes "".

    Raises:
        UserError: a setting cannot be read, does not fit, or names a path that does not exist.
    """
    values: dict[str, Any] = {}
    # Before the config is read: its checks import the parts that it names.
    add_module_folder(CURRENT_FOLDER if file is None else file.parent)
    if file is not None:
        values = read_yaml(file)
        # A whole posttrain.yaml: its other sections are about the loop, and its `data` names pool and test set.
        if isinstance(values.get("data"), dict):
            values = {"columns": values["data"].get("columns")} | {
                key: values[key] for key in ("seed", "model", "task", "train") if key in values
            }
        # Checked alone first, so that a mistake in the file names the file and not an option.
        with config_lines(CURRENT_FOLDER, str(file)):
            TrainJobConfig.read({"model": "", "data": ""} | values, str(file))
    for key, value in options.items():
        if value is not None:
            _set_value(values, key, value[0] if isinstance(value, list) and len(value) == 1 else value)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key:
            raise UserError(f"`{change}` is not a setting", where="--set", fix="key=value, such as train.epochs=3")
        # As YAML: `train.epochs=3` is a number and `train.shuffle=false` a truth value, as in the file.
        value = parse_yaml(text, f"--set {key}")
        if (option := _OPTIONS.get(key)) and options.get(key) not in (None, value, [value]):
            raise UserError(f"{option} gives another value", where=f"--set {key}", fix="leave one out")
        _set_value(values, key, value)
    # The config's own error would name the key train.objective, which the user has not written.
    if options.get("train.objective") is not None:
        objective_spec(options["train.objective"], "--objective")
    if plan:
        values.setdefault("data", "")
    for name in ("model", "data"):
        if name not in values:
            raise UserError(f"no {name} is named", where=f"--{name}")
    config = TrainJobConfig.read(values, "--set")
    # A path given as an option is relative to the current folder, one in the file to the file.
    named = [
        *(key for key, value in options.items() if value is not None and key != "train.objective"),
        *(text.partition("=")[0] for text in changes),
    ]

    def root(key: str) -> Path:
        """Returns the folder that a path is relative to: the config file's, or the current one for options."""
        return (
            CURRENT_FOLDER if file is None or any(f"{key}.".startswith(f"{name}.") for name in named) else file.parent
        )

    return config.with_paths_from(root)


@dataclass(frozen=True)
class TrainingRecords:
    """The records to train on.

    Attributes:
        records: RECORD table.
        version: id of their dataset version; None for files.
    """

    records: pa.Table
    version: str | None = None


def read_records(settings: TrainJobConfig, workspace: Path) -> TrainingRecords:
    """Reads the records of the file, or of the workspace's dataset version, that the settings name.

    Raises:
        UserError: a record is bad, or repeats one that models are measured on.
    """
    name = settings.files[0]
    if len(settings.files) > 1 or not _is_version(name, workspace):
        return TrainingRecords(read_files(settings))
    with open_store(workspace) as store:
        version = open_version(store, name)
        # A set of the loop is checked against what the loop measures on; other versions hold their own test records.
        test = store.metadata.named("test")
        if not version.whole or not test:
            return TrainingRecords(training_records(version, name), version.id)
        tested = Version.open(store.artifacts, test).records()
        if not (workspace / CONFIG_FILE).is_file():
            return TrainingRecords(training_records(version, name, {"test": tested}, DataConfig().steps), version.id)
        config = read_config(workspace)
        measured = measured_on(config, tested, workspace)
        return TrainingRecords(training_records(version, name, measured, config.data.steps), version.id)


def read_validation(settings: TrainJobConfig, workspace: Path) -> pa.Table | None:
    """Reads the validation split of the version that ``train.evaluate.data`` names; None if it names none.

    Raises:
        UserError: the version has no such records.
    """
    name = settings.train.evaluate.data
    if not isinstance(name, str) or not _is_version(name, workspace):
        return None
    with open_store(workspace) as store:
        version = open_version(store, name)
        if "validation" not in version.splits or not version.count("validation"):
            fix = "give it one by data.splits.validation, or name a share of the training records, such as 0.1"
            raise UserError(f"{name} has no validation split", where="train.evaluate.data", fix=fix)
        return version.records("validation")


def _is_version(name: str, workspace: Path) -> bool:
    """Returns whether a name of records is that of a dataset version of the workspace."""
    is_remote = "://" in name or name.startswith(HUB_PREFIX)
    is_file = is_remote or Path(name).exists() or ("@" not in name and Path(name).suffix)
    return not is_file and (workspace / ".posttrain" / "format.json").is_file()


def _set_value(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        if part == "objective" and isinstance(values.get(part), str):
            values[part] = {"name": values[part]}  # the short form
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise UserError(f"`{part}` is not a section", where=f"--set {key}")
    if key == "train.objective" and isinstance(value, str):
        value = with_name(values.get(last), value)
    values[last] = value
