"""``posttrain train``: trains a model on a file or a dataset version, outside of a workspace's loop."""

import itertools
import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.text import Text

from posttrain.cli.output import console, print_line
from posttrain.cli.train_options import (
    ConfigOption,
    DataOption,
    ModelOption,
    ObjectiveOption,
    SetOption,
    read_records,
    read_settings,
    read_validation,
)
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store
from posttrain.models.chat import TokenizedExample
from posttrain.models.sources import fetch_once, locate
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.store.message import counted
from posttrain.store.workers import join_workers
from posttrain.train.api import read_held_out
from posttrain.train.data.compatibility import check_template
from posttrain.train.data.encoding import encode, load_encoder
from posttrain.train.standalone import CONFIG, METRICS, TrainJobConfig, train_standalone

log = logging.getLogger("posttrain")

_STAGE = "train alone"

_LOSSES = ("first_loss", "last_loss")

_TOKEN_STYLES = {"trained": "bold green", "context": "dim", "cut off": "red strike"}

_READ_FOR = {"reward": "read to its end for one reward", "classes": "read to its end for its class"}


def train(
    model: ModelOption = None,
    data: DataOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the trained model, required to train; the same folder resumes a stopped training."
        ),
    ] = None,
    objective: ObjectiveOption = None,
    config: ConfigOption = None,
    set: SetOption = None,
    fork: Annotated[
        bool,
        typer.Option(
            "--fork", help="Resume a stopped training although config, data or code have changed since its start."
        ),
    ] = False,
    inspect: Annotated[
        int | None, typer.Option(min=1, help="Print this many examples as the model sees them, and exit.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile three steps; OUT/profile gets a trace and a table of operations.")
    ] = False,
    autotune: Annotated[
        bool,
        typer.Option("--autotune", help="Do not train: find the fastest settings and write them to OUT/config.yaml."),
    ] = False,
    autotune_seconds: Annotated[
        float | None, typer.Option(min=10, help="Seconds that --autotune may take; 300 by default.")
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Train a model on a file or a dataset version; resume a stopped training."""
    options = {
        "model": model,
        "data": data,
        "train.objective": objective,
        "train.profile.steps": 3 if profile else None,
    }
    if autotune_seconds is not None and not autotune:
        raise UserError("there is nothing to spend them on", where="--autotune-seconds", fix="add --autotune")
    if autotune and (inspect is not None or profile or fork):
        raise UserError("finds settings and does nothing else", where="--autotune", fix="leave out the other option")
    settings = read_settings(config, options, set or [])
    # `--inspect` and a fresh initialisation read no weights, so that they need none on disk.
    source = locate(settings.model, Path(), weights=inspect is None and not settings.train.from_scratch)
    given_records = read_records(settings, workspace)
    records = given_records.records
    if inspect is not None:
        print_examples(settings, source, records.slice(0, inspect))
        return
    if out is None:
        raise UserError("say where to write the model", where="--out")
    if autotune:
        _tune(out, settings, records, partial(fetch_once, source), autotune_seconds or 300.0)
        return
    held_out = read_held_out(settings, read_validation(settings, workspace))
    with _track_run(workspace, given_records.version, settings, out):
        summary = train_standalone(out, settings, records, fork=fork, held_out=held_out, extendable=True)
    skipped = f" ({summary['skipped_steps']} skipped)" if summary.get("skipped_steps") else ""
    first, last = ("no number" if loss is None else f"{loss:.4f}" for loss in map(summary.get, _LOSSES))
    lines = [f"{counted(summary['steps'], 'step')}{skipped}, loss {first} to {last}"]
    if best := dict(summary.get("evaluation", {})):
        steps = best.pop("steps")
        values = (f"{name} {value:.4g}" for name, value in best.items() if value is not None)
        lines.append(f"held out, after {counted(steps, 'step')}: {', '.join(values)}")
    lines += [f"model: {out}   steps: {out / METRICS}", f"curves: {shlex.join(['posttrain', 'report', str(out)])}"]
    print_line("\n".join(lines))


@contextmanager
def _track_run(workspace: Path, version: str | None, settings: TrainJobConfig, out: Path) -> Iterator[None]:
    """Records the run in the workspace, so that `posttrain data gc` keeps the version that it was trained on."""
    if version is None:
        yield
        return
    folder = str(out.resolve())
    key = digest({"stage": _STAGE, "dataset": version, "out": folder})
    config = {**settings.model_dump(mode="json"), "out": folder}
    with ExitStack() as joined:
        try:
            with open_store(workspace, write=True) as store:
                # Only its lock file is held for hours, and no connection to a server.
                worker = joined.enter_context(join_workers(store.home))
                run = store.metadata.start_run(
                    _STAGE, key, seed=settings.seed, config=config, inputs={"dataset": version}, worker=worker
                )
        except UserError as error:
            # A read-only workspace must not prevent a training.
            log.warning("that the version was trained on is not recorded: %s", error)
            yield
            return
        try:
            yield
        # Ctrl-C too: a run must not stay open in the metadata.
        except BaseException as error:
            with open_store(workspace, write=True) as store:
                store.metadata.fail_run(run.id, f"{type(error).__name__}: {error}")
            raise
        with open_store(workspace, write=True) as store:
            store.metadata.finish_run(run.id)


def _tune(
    out: Path, settings: TrainJobConfig, records: pa.Table, fetch: Callable[[Path], Path], seconds: float
) -> None:
    from posttrain.train.autotune import as_overrides, autotune_settings

    tuned = autotune_settings(out, settings, records, fetch, seconds)
    before = f"{tuned.before:,.0f}" if tuned.before else "none that could be measured"
    rate = f"{tuned.after:,.0f} tokens/s, before {before}; trials: {len(tuned.trials)}"
    if tuned.settings == tuned.trials[0].settings:
        trials = counted(len(tuned.trials), "trial")
        rate = f"nothing better than your settings in {trials}: {tuned.after:,.0f} tokens/s"
    lines = [
        rate,
        *(f"  --set {change}" for change in as_overrides(tuned)),
        shlex.join(["posttrain", "train", "--config", str(out / CONFIG), "--out", str(out)]),
    ]
    print_line("\n".join(lines))


def print_examples(config: TrainJobConfig, source: str, records: pa.Table) -> None:
    """Prints every record's sequences: trained tokens, context, and tokens that are cut off.

    Where a whole text has one result, such as a reward, no token is trained, and the title says what it is read for.
    """
    from posttrain.train.objectives.build import record_shape, supervised_unit

    result = _READ_FOR.get(config.train.spec.output)
    encoder = load_encoder(source, config.task)
    shape, limit = record_shape(config.train, records), config.train.max_length
    check_template(encoder.chat)
    # Encoded twice: within the limit, which raises for records that cannot be trained on, and whole, to show the cut.
    encode(encoder, records, limit, shape)
    whole, _ = encode(encoder, records, max(limit, 1 << 30), shape)
    for number, (unit, record) in enumerate(zip(whole, records["id"].to_pylist(), strict=True), 1):
        supervised = supervised_unit(config.train, unit)
        sides = ("chosen", "rejected") if shape == "pair" else ("",)
        for side, sequence, before in zip(sides, supervised, unit, strict=True):
            title = f"{number} {side}".rstrip()
            use = result or f"{sum(sequence.supervised)} trained"
            console.rule(f"{title}  {record}  {len(sequence.ids)} tokens, {use}", align="left")
            # By the length before supervision, in which a classifier's extra token after the text counts.
            cut = max(0, len(before.ids) - limit)
            console.print(_coloured_tokens(encoder.chat.tokenizer, sequence, cut), soft_wrap=True)


def _coloured_tokens(tokenizer: Any, sequence: TokenizedExample, cut: int) -> Text:
    kinds = ["cut off" if at < cut else "trained" if on else "context" for at, on in enumerate(sequence.supervised)]
    text = Text()
    for kind, run in itertools.groupby(zip(kinds, sequence.ids, strict=True), key=lambda pair: pair[0]):
        decoded = tokenizer.decode([token for _, token in run])
        # Without colours the kind is written, and each run of tokens has a line of its own.
        if not console.is_terminal:
            text.append(f"[{kind}] ")
            decoded += "\n"
        text.append(decoded, _TOKEN_STYLES[kind])
    return text
