"""``posttrain select value``: estimates what labelled records are worth."""

import csv
import io
import json as json_text
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import RECORD_COLUMNS, JsonOption, print_json, print_line, print_table, record_cells
from posttrain.cli.workspace import CURRENT_FOLDER, ColumnOption, WorkspaceOption, merge_columns, open_workspace
from posttrain.store.errors import UserError
from posttrain.store.files import check_new_file, remove_tree, write_atomically

if TYPE_CHECKING:
    import pyarrow as pa

    from posttrain.attribution.valuation import ValuationMethod
    from posttrain.inspect.record_values import RecordValues

_FOLDS = 10


def value(
    files: Annotated[list[Path] | None, typer.Argument(help="Labelled records; those of the loop by default.")] = None,
    method: Annotated[str, typer.Option(help="knn_shapley, tmc_shapley or data_oob.")] = "knn_shapley",
    by: Annotated[str, typer.Option(help="Unit to value: record, source (a file) or label.")] = "record",
    worst: Annotated[int, typer.Option(min=1, help="Number of rows to show.")] = 20,
    out: Annotated[Path | None, typer.Option(help="All values as a new .csv, .jsonl or .parquet file.")] = None,
    folds: Annotated[int | None, typer.Option(min=2, help="Cross-validation folds; 10 by default.")] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Permutations of tmc_shapley (100 by default), or bags of data_oob (400).")
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="Embedding model: champion (in a workspace), minilm (of files), a folder or Hub id in its layout."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seeds folds and sampling.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    column: ColumnOption = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Estimate how much labelled records help a model predict each other; list the most harmful first.

    Each fold of the records is held out in turn, and the others are valued by how well they predict it. Test records
    are never used, so that they can still judge a model trained on the result. A killed run resumes with the same
    command; on files, that takes --out.
    """
    from posttrain.attribution.valuation import DATA_OOB, ValuationMethod
    from posttrain.inspect.record_values import check_by, value_labelled, value_records

    unit, how = check_by(by), ValuationMethod(method, draws, seed, workers)
    if folds is not None and method == DATA_OOB:
        raise UserError(f"{method} holds nothing out", where="--folds", fix="leave it out")
    if column and not files:
        raise UserError("there is no file to map columns of", where="--column", fix="name the file")
    parts = folds or _FOLDS
    if out is not None:
        check_new_file(out, _WRITERS)
    if files:
        from posttrain.inspect.labelled_records import embed_sentences, labelled_records

        records = labelled_records(files, merge_columns(None, column))
        # Files have no workspace that could keep finished parts: they lie beside the output.
        resumable = replace(how, folder=None if out is None else _partial_folder(out))
        report = value_records(records, embed_sentences(records, embedder or "minilm"), resumable, unit, parts, seed)
    else:
        with open_workspace(workspace, write=True) as (store, config):
            report = value_labelled(store, config, how, unit, parts, embedder or "champion", seed)
    if out is not None:
        write_atomically(out, _WRITERS[out.suffix.lower()](report.table))
    # Only now that the values are on disk: a run killed before this line resumes from the parts.
    if files and out is not None:
        remove_tree(_partial_folder(out))
    _show(report, how, by, worst, out, json)


def _partial_folder(out: Path) -> Path:
    """Returns the folder of finished parts, from which a killed run over files resumes."""
    return out.with_name(f"{out.name}.unfinished")


def _show(report: "RecordValues", how: "ValuationMethod", by: str, worst: int, out: Path | None, json: bool) -> None:
    rows = report.table.slice(0, worst).to_pylist()
    harmful = report.harmful.num_rows
    lines = _summary_lines(report, how, by, out)
    if json:
        print_json(
            {
                "method": how.name,
                "draws": how.draws,
                "seed": how.seed,
                "folds": report.folds,
                "by": by,
                "valued": report.table.num_rows - report.unknown,
                "without_value": report.unknown,
                "harmful": harmful,
                "harmless": report.harmless,
                "worst": rows,
                "advice": lines,
            }
        )
        return
    if by == "record":
        names = ["value", "s.e.", *RECORD_COLUMNS]
        rows = [[*map(_number, (row["value"], row["standard_error"])), *record_cells(row)] for row in rows]
    else:
        names = [by, "records", "all", "each", "s.e."]
        rows = [
            [row["name"], row["records"], *(_number(row[name]) for name in ("total", "value", "standard_error"))]
            for row in rows
        ]
    print_table("", names, rows)
    for line in lines:
        print_line(line)


def _summary_lines(report: "RecordValues", how: "ValuationMethod", by: str, out: Path | None) -> list[str]:
    """Summarises the method and the harmful records, and says what to do about them."""
    plural = {"record": "records", "source": "sources", "label": "labels"}[by]
    against = (
        "records that a model did not learn from"
        if report.folds is None
        else f"each of {report.folds} parts of the records in turn"
    )
    lines = [f"{how.name} of {report.table.num_rows} {plural}, measured on {against}; no test record was used"]
    if report.unknown:
        reason = (
            "every bag drew them" if report.folds is None else "nothing else has their label, or too little was drawn"
        )
        lines.append(f"{report.unknown} have no value: {reason}")
    harmful = report.harmful.num_rows
    limit = f"{report.harmless:.3g}"
    judged = "predicted worse than by guessing" if how.name == "data_oob" else "surely harmful"
    lines.append(f"{judged} (value + 2 standard errors < {limit}): {harmful} of {report.table.num_rows} {plural}")
    if harmful and by == "record":
        look = "look at them, and correct the labels that are wrong"
        if out is None:
            lines.append(f"{look}; --out values.csv writes a file that leaves them out")
        else:
            lines.append(f"{look}; to leave them out, put {{drop: {{file: {out.absolute()}}}}} first into data.steps")
    return lines


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2g}"


def _csv(table: "pa.Table") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, table.column_names, lineterminator="\n")
    writer.writeheader()
    for row in table.to_pylist():
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    # `true` as in the JSON lines, where Python's CSV would write `True`.
    return str(value).lower() if isinstance(value, bool) else value


def _jsonl(table: "pa.Table") -> bytes:
    return "".join(json_text.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()).encode()


def _parquet(table: "pa.Table") -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink)
    return bytes(sink.getvalue())


_WRITERS: "dict[str, Callable[[pa.Table], bytes]]" = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
