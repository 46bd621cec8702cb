"""``posttrain data synthesize``: new records from seed records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from posttrain.cli.data.stored import opened_store, stored_version
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, print_json, print_table
from posttrain.data.export import export
from posttrain.data.reading import read
from posttrain.data.schema import concat
from posttrain.data.synthesis.config import SynthesisConfig
from posttrain.data.synthesis.replies import Generate, Turns
from posttrain.data.synthesis.synthesize import synthesize as write_records
from posttrain.loop.config import CONFIG_FILE, read_config
from posttrain.store.errors import UserError


def synthesize(
    seeds: Annotated[str, typer.Argument(help="A file of records, or a dataset version such as support@v1.0.0.")],
    out: Annotated[Path, typer.Argument(help="The new .jsonl file; raw replies are kept beside it.")],
    records: Annotated[int, typer.Option(help="How many are wanted.", min=1)] = 100,
    method: Annotated[str, typer.Option(help="instructions, label_inputs or paraphrases.")] = "instructions",
    endpoint: Annotated[str | None, typer.Option(help="An OpenAI-compatible one, up to /v1.")] = None,
    model: Annotated[str, typer.Option(help="The endpoint's model; without one a folder, Hub id or smollm2-135m.")] = (
        "smollm2-135m"
    ),
    key_variable: Annotated[str | None, typer.Option(help="The environment variable with the endpoint's key.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of examples.", min=0)] = 0,
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """Have a model write records like the seeds; what repeats them or each other is left out."""
    if out.exists():
        raise UserError("the file exists already", where=str(out), fix="remove it or name another")
    if out.suffix != ".jsonl" or not out.absolute().parent.is_dir():
        raise UserError("is no place for the records", where=str(out), fix="name a new .jsonl file in a folder")
    where = {"base_url": endpoint, "model": model, "key_variable": key_variable} if endpoint else None
    values = {"method": method, "records": records, "seed": seed, "endpoint": where}
    config = SynthesisConfig.read(values, "posttrain data synthesize")
    given = _seeds(seeds, workspace)
    generate = None if endpoint else _local(model)
    made = write_records(given, config, generate, out.with_suffix(".replies"), model=None if endpoint else model)
    export(made.records, out)
    if json:
        print_json({"counts": dict(made.counts), "usage": vars(made.usage)})
        return
    print_table("", ["what", "count"], [[what, count] for what, count in made.counts.items()])
    console.print(f"wrote {made.records.num_rows} records to {out}", markup=False, soft_wrap=True)


def _seeds(text: str, workspace: Path) -> pa.Table:
    columns = read_config(workspace).data.columns if (workspace / CONFIG_FILE).is_file() else None
    if Path(text).exists() or ("@" not in text and Path(text).suffix):
        return concat(list(read(Path(text), columns, name=text)))
    with opened_store(workspace) as store:
        version = stored_version(store, text)
        return version.records(version.splits[0] if not version.whole else None)


def _local(name: str) -> Generate:
    """Answers of a model on this machine."""
    from tempfile import TemporaryDirectory

    from posttrain.models.generate import generate
    from posttrain.models.language_model import load
    from posttrain.models.sources import fetch, locate
    from posttrain.models.task import TaskConfig

    located = locate(name, Path())
    folder = TemporaryDirectory(prefix="posttrain-")
    fetch(located, Path(folder.name) / "model")
    lm = load(Path(folder.name) / "model", TaskConfig(max_new_tokens=512))

    def answer(prompts: Sequence[Turns]) -> list[str | None]:
        return [
            one.text if one.finished else None for one in generate(lm, [list(map(dict, turns)) for turns in prompts])
        ]

    return answer


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(synthesize)
