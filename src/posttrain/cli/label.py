"""``posttrain label``: exports batches to label, imports the labels, and reports on them."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.serve import serve_labelling
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace, workspace_option
from posttrain.label.answer_kinds import KINDS
from posttrain.label.tokens import Conflict
from posttrain.loop.label_reports import label_reports
from posttrain.loop.open_batch import export_batch, import_batch, missing_answers, waiting_round
from posttrain.loop.own_batches import OwnLabels, write_own_labels
from posttrain.store.errors import UserError, suggest
from posttrain.store.message import Message, counted
from posttrain.store.workspace import Workspace

if TYPE_CHECKING:
    from posttrain.label.formats.importer import ImportResult
    from posttrain.label.queue import Queue
    from posttrain.label.queue_rows import Progress
    from posttrain.loop.config import Config

app = typer.Typer(
    name="label", help="Label batches on the pages or in files, and report the quality of labels.", no_args_is_help=True
)

_FORMATS = ("csv", "jsonl", "label-studio")
_UNITS = ("code-points", "utf-16", "code-points-lf", "utf-16-lf")

FormatOption = Annotated[str | None, typer.Option("--format", help=f"One of {', '.join(_FORMATS)}.")]


app.command(name="serve")(serve_labelling)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="File to write; a folder for `datasets`.")],
    format: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(_FORMATS)}, and datasets (Hugging Face); csv by default.")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Batch to write; the one that waits for labels by default.")] = None,
    positions: Annotated[
        str | None,
        typer.Option(help=f"Unit of the positions of spans: {', '.join(_UNITS)}; utf-16 for label-studio by default."),
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Write the pending batch to a CSV file, to be filled in elsewhere, or any batch in a format of your choice."""
    from posttrain.label.formats.exporter import DATASETS, export_queue

    _check_format(format, (*_FORMATS, DATASETS))
    with open_workspace(workspace) as (store, config):
        if (
            batch is None
            and positions is None
            and format in (None, "csv")
            and (waiting_round(store) is not None or not _batches(store, config))
        ):
            count = export_batch(store, config, file)
            command = f"posttrain label import {shlex.quote(str(file))} {workspace_option(workspace)}".rstrip()
            print_line(f"wrote {counted(count, 'record')} to {file}; fill the label column, then: {command}")
            return
        queue = _queue(store, config)
        name = batch or _pending_batch(queue, waiting_round(store)) or _newest_batch(queue)
        count = export_queue(queue, name, file, format or "csv", positions)
    print_line(f"wrote {counted(count, 'record' if format == DATASETS else 'item')} of the batch {name} to {file}")


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="The filled CSV file, or a file of labels in one of the formats.")],
    format: FormatOption = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Batch to import into; the one that waits for labels by default, else a new one named after the file."
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help=f"Kind of the answers: {', '.join(KINDS)}; detected from the file by default.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Question to import, if the file has several.")] = None,
    field: Annotated[str | None, typer.Option(help="Name of the text to label, if an item has several.")] = None,
    annotator: Annotated[
        str | None, typer.Option(help="Annotator to record where the file names none; the file's name by default.")
    ] = None,
    gold: Annotated[
        bool, typer.Option("--gold", help="Import gold items: known answers, by which annotators are measured.")
    ] = False,
    positions: Annotated[
        str | None,
        typer.Option(
            help=f"Unit of the positions of spans: {', '.join(_UNITS)}; inferred from the quoted words by default."
        ),
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Import labels from a file into the batch that waits for them, else into a new batch; then `posttrain run`."""
    from posttrain.label.formats.importer import ImportOptions, import_queue
    from posttrain.label.webhook import webhook_calls

    _check_format(format, _FORMATS)
    with (
        open_workspace(workspace, write=True) as (store, config),
        webhook_calls(store.metadata, config.label.webhook),
    ):
        special = batch or kind or question or field or gold or positions
        waiting = waiting_round(store)
        is_csv = format == "csv" or (format is None and file.suffix.lower() not in (".json", ".jsonl"))
        if waiting is not None and is_csv and not special:
            filled, total = import_batch(store, config, file, annotator)
            # A part of the labels may be imported, to be completed later; the round waits until all are in.
            rest = (missing_answers(store, config) or "now: posttrain run") if filled == total else None
            print_line(f"{filled} of {total} rows are filled in" + (f"; {rest}" if rest else ""))
            return
        queue = _queue(store, config)
        pending = _pending_batch(queue, waiting)
        if batch is None and not gold:
            batch = pending
        labels = tuple(config.task.label_set) or None
        options = ImportOptions(format, batch, kind, question, annotator, field, gold, labels, positions)
        result = import_queue(queue, file, options)
        progress = queue.progress(result.batch)
        own = None if gold else write_own_labels(store, config).get(result.batch)
    _print_import(result)
    if own is not None:
        print_line(_describe_own(own, progress))
    if result.batch == pending and progress.resolved == progress.items:
        print_line("all items are decided; now: posttrain run")


@app.command()
def close(
    batch: Annotated[str, typer.Argument(help="Name of the batch.")],
    drop: Annotated[bool, typer.Option("--drop", help="Drop the items that are not decided.")] = False,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Close a batch of the queue: annotators get no more items of it, and its answers are final."""
    from posttrain.label.audit import record_change

    with open_workspace(workspace, write=True) as (store, config):
        queue = _queue(store, config)
        if queue.batch(batch) is None:
            names = [each.name for each in queue.batches("open")]
            raise UserError(f"there is no batch `{batch}`", fix=suggest(batch, names) if names else None)
        with store.metadata.transaction():
            dropped = queue.drop_rest(batch, "terminal") if drop else 0
            try:
                queue.finish_batch(batch)
            except Conflict as error:
                raise UserError(str(error).partition(";")[0], fix="wait for the answers, or give --drop") from None
            record_change(store.metadata, "terminal", "close batch", batch, after={"dropped": dropped})
    print_line(
        f"the batch {batch} is closed" + (Message("; {count} items were dropped", count=dropped) if dropped else "")
    )


def _describe_own(own: OwnLabels, progress: "Progress") -> str:
    """Says whether the labels of a batch without a round reach training."""
    if own.reason is not None:
        return (
            f"not trained on: {own.reason}; posttrain label export FOLDER --format datasets writes records to train on"
        )
    parts = [f"labels that join the training set with the next run: {own.labels}"]
    parts += [f"answers that an earlier batch has too: {own.repeated}"] * bool(own.repeated)
    parts += [f"items that are not decided yet: {progress.undecided}"] * bool(progress.undecided)
    parts += [f"they are in {own.file}, and nobody is asked for them again"] * (own.file is not None)
    return "; ".join(parts)


def _print_import(result: "ImportResult") -> None:
    counts = [counted(result.items, "item"), counted(result.answers, "answer")]
    counts += [counted(result.gold, "gold item")] * bool(result.gold)
    counts += [Message("{count} answers were there already", count=result.repeated)] * bool(result.repeated)
    where = "the new batch" if result.created else "the batch"
    print_line(f"read {', '.join(counts)} into {where} {result.batch} ({result.format}, {result.kind})")
    if result.left_out:
        parts = ", ".join(f"{name} ({count})" for name, count in result.left_out.most_common())
        print_line(f"left out, as they have no meaning here: {parts}")
        # Work of people: they may have forgotten a label.
        for name, record in result.first_left_out.items():
            if name.startswith("annotations"):
                print_line(f"  the first of {name}: {record}")
    if result.uncertain:
        print_line(
            "warning: records with spans that mean other words where a tool counts UTF-16 code units, or CRLF once: "
            f"{len(result.uncertain)}, first {result.uncertain[0]}; compare them, and name the unit with --positions"
        )


def _check_format(format: str | None, formats: tuple[str, ...]) -> None:
    if format is not None and format not in formats:
        raise UserError(f"`{format}` is not a format", where="--format", fix=suggest(format, formats))


def _queue(store: Workspace, config: "Config") -> "Queue":
    from posttrain.label.queue import Queue

    return Queue(store.metadata, config.label.queue)


def _batches(store: Workspace, config: "Config") -> bool:
    return bool(_queue(store, config).batches())


def _pending_batch(queue: "Queue", waiting: int | None) -> str | None:
    """Returns the batch of the round that waits for labels, or None."""
    if waiting is None:
        return None
    return next((each.name for each in reversed(queue.batches("open")) if each.round == waiting), None)


def _newest_batch(queue: "Queue") -> str:
    """Returns the newest batch that is open, or else the newest one."""
    batches = queue.batches("open") or queue.batches()
    if not batches:
        raise UserError("there is no batch", fix="posttrain run, or posttrain label import FILE")
    return batches[-1].name


@app.command()
def report(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """Show the labels of each round, and the agreement, gold accuracy, workload and alarms of the queue."""
    from posttrain.label.quality.queue_report import report_on_queue

    with open_workspace(workspace, checked=False) as (store, config):
        reports = label_reports(store)
        quality = report_on_queue(_queue(store, config)) if _batches(store, config) else None
    if json:
        print_json({"rounds": reports, "quality": quality})
        return
    columns = ["round", "labels", "classes", "annotators", "champion right", "on the pool"]
    rows = [[r["round"], r["labels"], len(r["classes"]), _annotators(r), r["agreement"], _on_pool(r)] for r in reports]
    print_table("", columns, rows)
    for entry in reports:
        for sentence in (entry["models"] or {}).get("sentences", ()):
            print_line(f"round {entry['round']}: {sentence}")
    if quality is not None and quality["counts"]["answers"]:
        _print_quality(quality)


def _print_quality(quality: dict[str, Any]) -> None:
    counts, agreement, outlook = quality["counts"], quality["agreement"], quality["outlook"]
    print_line(f"\nanswers: {counts['answers']}, annotators: {counts['annotators']}, items: {counts['items']}")
    names = {
        "percent": "equal pairs",
        "cohen": "Cohen's kappa",
        "fleiss": "Fleiss' kappa",
        "alpha": "Krippendorff's alpha",
    }
    if agreement["pairs"]:
        rows = [
            [title, *(agreement[name][end] for end in ("value", "low", "high", "n"))] for name, title in names.items()
        ]
        print_table("", ["agreement", "value", "low", "high", "items"], rows)
    work, gold = quality["work"], quality["gold"]["by_annotator"]
    rows = [
        [part["annotator"], part["kind"], part["labels"], part["median_seconds"]]
        + [gold.get(part["annotator"], {}).get(key) for key in ("value", "low", "high", "n")]
        for part in work
    ]
    print_table("", ["annotator", "kind", "labels", "seconds", "gold right", "low", "high", "gold items"], rows)
    if outlook["wanted"]:
        end = f"done about {outlook['done_at'][:16].replace('T', ' ')} UTC" if outlook["done_at"] else "no pace yet"
        print_line(Message("{wanted} answers are wanted, {per_day:.0f} come a day: {end}", **outlook, end=end))
    for alarm in quality["alarms"]:
        print_line(f"alarm: {alarm['sentence']} ({alarm['kind']}, p = {alarm['p_value']:.2g})")
    if not quality["alarms"]:
        print_line("no alarms")


def _annotators(report: dict[str, Any]) -> str:
    """Formats the annotators, each once: labels that several agreed on have the names of all."""
    return ", ".join(dict.fromkeys(name for names in report["annotators"] for name in names.split(", ")))


def _on_pool(report: dict[str, Any]) -> str:
    """Formats the agreement estimated from the randomly drawn records."""
    estimate = report["pool_agreement"]
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})" if estimate else ""
