"""``posttrain data export``: a version's records as a file."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.data.stored import VersionArgument, opened_store, stored_version
from posttrain.cli.shared import HERE, WorkspaceOption, console
from posttrain.data.versions.export import export as export_records
from posttrain.data.versions.hugging_face import export_folder
from posttrain.store.errors import UserError


def export(
    version: VersionArgument,
    file: Annotated[Path, typer.Argument(help=".jsonl, .csv, .tsv or .parquet; a folder for Hugging Face datasets.")],
    split: Annotated[str | None, typer.Option(help="This side alone.")] = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Write a version's records to a new file, or to a folder that `datasets.load_from_disk` reads."""
    with opened_store(workspace) as store:
        found = stored_version(store, version)
        if split is not None and split not in found.splits:
            raise UserError(f"there is no split `{split}`", where="--split", fix=f"one of {', '.join(found.splits)}")
        if file.suffix:
            records = found.records(split)
            export_records(records, file)
            count = records.num_rows
        else:
            names = [split] if split else [name for name in found.splits if found.count(name)]
            count = export_folder({name: found.records(name) for name in names}, file)
    console.print(f"wrote {count} records to {file}", markup=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(export)
