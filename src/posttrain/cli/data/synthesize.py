"""``posttrain data synthesize``: has a model write new records from seed records."""

from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import typer

from posttrain.cli.data.add import parse_step_option
from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store, open_version
from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.data.steps.step import DataStep
from posttrain.data.synthesis.config import SynthesisConfig
from posttrain.data.synthesis.synthesize import synthesize as write_records
from posttrain.data.versions.export import export_file
from posttrain.data.versions.recipe import parse_step
from posttrain.loop.config import read_config
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import write_atomically
from posttrain.store.message import counted

if TYPE_CHECKING:
    from posttrain.data.generation.local_model import LocalModel

_LOCAL_TOKENS = 256


def synthesize(
    seeds: Annotated[str, typer.Argument(help="A file of records, or a dataset version such as support@v1.0.0.")],
    out: Annotated[Path, typer.Argument(help="The new .jsonl file; raw replies are kept next to it.")],
    records: Annotated[int, typer.Option(help="Number of records to write.", min=1)] = 100,
    method: Annotated[str, typer.Option(help="instructions, label_inputs or paraphrases.")] = "instructions",
    endpoint: Annotated[str | None, typer.Option(help="URL of an OpenAI-compatible endpoint, up to /v1.")] = None,
    model: Annotated[
        str, typer.Option(help="The endpoint's model; without --endpoint a folder, Hub id or smollm2-135m.")
    ] = ("smollm2-135m"),
    key_variable: Annotated[
        str | None, typer.Option(help="Environment variable that holds the endpoint's key.")
    ] = None,
    form: Annotated[
        str | None, typer.Option(help="Reply format: json (default for endpoints) or lines (for local models).")
    ] = None,
    step: Annotated[
        list[str] | None,
        typer.Option(
            help="Step applied to new records: minhash, or 'length: {input: {min_words: 3}}'; repeatable, in order. "
            "Default: length, gopher_repetition, exact, minhash."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest reply in tokens; 1024 by default, 256 for local models.", min=1)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 for greedy decoding.", min=0)] = 0.7,
    seed: Annotated[int, typer.Option(help="Seeds the choice of examples and a local model's sampling.", min=0)] = 0,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Have a model write records like the seeds; drop near copies of seeds and of each other."""
    if out.exists():
        raise UserError("the file exists already", where=str(out), fix="remove it or name another")
    if out.suffix != ".jsonl" or not out.absolute().parent.is_dir():
        raise UserError("cannot hold the records", where=str(out), fix="name a new .jsonl file in an existing folder")
    service: dict[str, Any] = {"base_url": endpoint, "model": model, "key_variable": key_variable}
    if max_tokens is not None:
        service["max_tokens"] = max_tokens
    values: dict[str, Any] = {
        "method": method,
        "records": records,
        "seed": seed,
        "temperature": temperature,
        "endpoint": service if endpoint else None,
    }
    config = SynthesisConfig.read(
        {**values, "form": form or ("json" if endpoint else "lines")}, "posttrain data synthesize"
    )
    # Parsed before a request is paid for.
    steps = None if step is None else [_parse_step(text, workspace) for text in step]
    seed_records = _read_seeds(seeds, workspace)
    local = None if endpoint else _load_local_model(model, max_tokens or _LOCAL_TOKENS, temperature, seed)
    replies, rejected = out.with_suffix(".replies"), out.with_suffix(".rejected.jsonl")
    settings = local.settings if local else None
    # Replies are stored as they come: a killed run resumes from them and pays for no request twice.
    result = write_records(seed_records, config, local, replies, model=model, settings=settings, steps=steps)
    _write_rejected(result.rejected, rejected)
    if not result.records.num_rows:
        counts = ", ".join(f"{name} {count}" for name, count in result.counts.items() if count)
        raise WorkError(f"{model} wrote no record that could be used ({counts}); see {rejected}")
    export_file(result.records, out)
    if json:
        print_json({"counts": dict(result.counts), "usage": vars(result.usage)})
        return
    print_table("", ["what", "count"], [[what, count] for what, count in result.counts.items()])
    print_line(f"wrote {counted(result.records.num_rows, 'record')} to {out}")
    if result.rejected.num_rows:
        print_line(f"wrote {result.rejected.num_rows} rejected records to {rejected}")


def _read_seeds(text: str, workspace: Path) -> pa.Table:
    columns = read_config(workspace).data.columns if (workspace / CONFIG_FILE).is_file() else None
    if Path(text).exists() or ("@" not in text and Path(text).suffix):
        return concat(list(read(Path(text), columns, name=text)))
    with open_store(workspace) as store:
        version = open_version(store, text)
        # Of the training split alone: records made from test records would leak them.
        return version.records(version.splits[0] if not version.whole else None)


def _parse_step(text: str, workspace: Path) -> DataStep:
    """Parses a step and checks its settings."""
    try:
        step = parse_step(parse_step_option(text)).located(workspace)
    except ValueError as error:
        raise UserError(str(error), where="--step") from None
    step.check()
    return step


def _write_rejected(rejected: pa.Table, path: Path) -> None:
    """Writes rejected records, one per line, with step, reason and other details; writes nothing without any."""
    rows = [{name: value for name, value in row.items() if value is not None} for row in rejected.to_pylist()]
    if rows:
        text = "".join(dumps({**row, "meta": loads(row["meta"])}, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(path, text.encode())


def _load_local_model(name: str, max_tokens: int, temperature: float, seed: int) -> "LocalModel":
    """Loads a model on this machine."""
    from tempfile import TemporaryDirectory

    from posttrain.data.generation.local_model import LocalModel
    from posttrain.models.language_model import load_language_model
    from posttrain.models.precision import choose_precision, count_weights
    from posttrain.models.sources import fetch, locate
    from posttrain.models.task import TaskConfig

    located = locate(name, Path())
    # No workspace is needed, so the converted model has no artifact; it can go once it is in memory.
    with TemporaryDirectory(prefix="posttrain-") as folder:
        path = Path(folder) / "model"
        fetch(located, path)
        lm = load_language_model(path, TaskConfig(), choose_precision(count_weights(path)))
    return LocalModel(lm, max_tokens, temperature, seed)
