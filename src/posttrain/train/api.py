"""``posttrain train`` in Python: a model and records in, a folder with what was trained out."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from posttrain.data.reading.data_files import display_path, to_data_path
from posttrain.data.reading.hub import fetch_hub_dataset
from posttrain.data.reading.memory import read_memory, record_index
from posttrain.data.reading.reader import read, unused_columns_note
from posttrain.data.reading.rows import Problem
from posttrain.data.records.record import concat, image_name
from posttrain.evaluate.held_out import SCORERS_KEY, held_out_score
from posttrain.models.sources import locate
from posttrain.store.errors import UserError
from posttrain.store.hub import HUB_PREFIX
from posttrain.store.logs import quiet_libraries
from posttrain.store.message import counted
from posttrain.store.paths import check_path
from posttrain.train.callbacks import AnyCallback, CallbackList, TrainingStopped
from posttrain.train.config import columns_read
from posttrain.train.monitor.metrics import finite, mean_loss, read_steps
from posttrain.train.objectives.registry import objective_spec as check_objective
from posttrain.train.objectives.registry import with_name
from posttrain.train.standalone import METRICS, TrainJobConfig, train_standalone

if TYPE_CHECKING:
    from posttrain.train.evaluation import HeldOut

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class TrainResult:
    """The outcome of `posttrain.train`.

    Attributes:
        folder: the folder of the model, in Hugging Face layout.
        steps: the number of optimiser steps that are done.
        finished: False if a callback has stopped the training: it has no model yet, and the same call resumes it.
        summary: what ``summary.json`` holds: ``examples``, ``steps``, ``tokens``, ``first_loss``, ``last_loss``,
            ``decisions`` of the monitor and others; of a stopped training only steps and losses.
    """

    folder: Path
    steps: int
    summary: Mapping[str, Any]
    finished: bool = True

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary an optimiser step (``step``, ``loss``, ``lr``, ``tokens_per_second`` …), of ``metrics.jsonl``.

        ``pandas.DataFrame(result.metrics)`` is a table of them.
        """
        return read_steps(self.folder / METRICS)

    def load(self) -> tuple[Any, Any]:
        """Loads what was trained as transformers' own objects.

        Returns:
            The model, ready to generate on the GPU if there is one, and its tokenizer, whose ``apply_chat_template``
            gives the prompts that it was trained on. An objective that trains a reward model or a classifier gives an
            ``AutoModelForSequenceClassification``.

        Raises:
            UserError: the training was stopped before its end, or the folder does not hold the model any more.
        """
        if not self.finished:
            raise UserError("the training was stopped", where=str(self.folder), fix="call train again: it resumes")
        from posttrain.models.language_model import load_transformers

        return load_transformers(self.folder)

    def __repr__(self) -> str:
        first, last = (self.summary.get(name) for name in ("first_loss", "last_loss"))
        losses = "" if first is None or last is None else f", loss {first:.4f} to {last:.4f}"
        return (
            f"TrainResult('{self.folder}', {counted(self.steps, 'step')}{losses}{'' if self.finished else ', stopped'})"
        )


def train(
    model: str | Path,
    data: Any,
    out: str | Path,
    *,
    objective: str | None = None,
    settings: Mapping[str, Any] | None = None,
    callbacks: AnyCallback | Sequence[AnyCallback] = (),
    fork: bool = False,
    held_out: Any = None,
) -> TrainResult:
    """Trains a model on records, resuming where an earlier call stopped.

    The same records give the same model, bit for bit, whether they come from a file or from memory.

    Args:
        model: a folder, a .gguf file, a Hub id, ``smollm2-135m`` or ``tiny``.
        data: a file of records, its URL or a folder of ``datasets``; ``hub:OWNER/NAME:SPLIT`` for a dataset of the Hub;
            a list of dictionaries, an Arrow table, a pandas or polars DataFrame or a ``datasets.Dataset``; or a list
            of several of these, read one after another. Records have one of the shapes of docs/data.md.
        out: gets the model in Hugging Face layout, ``config.yaml`` with every value, ``metrics.jsonl`` with one line an
            optimiser step, and ``summary.json``.
        objective: such as ``dpo``; None: that of ``settings``, or ``sft``.
        settings: other keys of a config file, such as ``{"seed": 1, "train": {"epochs": 3}}``. Paths are relative
            to the current folder.
        callbacks: functions called with the values of each step, or objects with the methods of `posttrain.Callback`;
            one may stand without a list.
            One that returns True stops the training, which saves a checkpoint and can be resumed.
        fork: resume although settings, data or code have changed since.
        held_out: records to evaluate on while the model trains, in the forms of ``data``, in place of
            ``train.evaluate.data`` of ``settings``.

    Returns:
        The result: folder, number of steps, summary, metrics of every step, and `TrainResult.load`.

    Raises:
        UserError: a setting, the model or a record cannot be used, the folder holds something else, another process
            trains into it, or settings, data or code have changed since the training began. A record that is not in a
            file is named by its index: ``data[3]``.
        WorkError: training fails and cannot be recovered, or a callback failed; the next call resumes.
    """
    quiet_libraries()
    called = CallbackList(callbacks)
    sources = _sources(data)
    files = [str(source) if isinstance(source, str | Path) else _describe(source) for source in sources.values()]
    values = {**(settings or {}), "model": str(model), "data": files if len(files) > 1 else files[0]}
    if held_out is not None:
        train = values.get("train", {})
        named_held_out = str(held_out) if isinstance(held_out, str | Path) else _describe(held_out)
        values["train"] = {**train, "evaluate": {**train.get("evaluate", {}), "data": named_held_out}}
    if objective is not None:
        # Checked alone first: the config's own error would name the key train.objective.
        check_objective(objective, "objective")
        train = values.get("train", {})
        values["train"] = {**train, "objective": with_name(train.get("objective"), objective)}
    config = TrainJobConfig.read(values, "settings")
    check_path(Path(out))
    out = Path(out).absolute()  # a callback may change the current folder
    config = config.with_paths_from(lambda key: Path())
    # A model that is none is reported before records are read.
    locate(config.model, Path(), weights=not config.train.from_scratch)
    # Files by their resolved paths, all else as it was given.
    named = zip(sources.items(), config.files, strict=True)
    resolved = {name: file if isinstance(item, str | Path) else item for (name, item), file in named}
    records = _read(resolved, config)
    is_file = held_out is None or isinstance(held_out, str | Path)
    evaluated = read_held_out(config, None if is_file else _read({"held_out": held_out}, config))
    in_memory = [name for name, item in sources.items() if not isinstance(item, str | Path)]
    try:
        with _record_indices(in_memory if is_file else [*in_memory, "held_out"]):
            summary = train_standalone(
                out,
                config,
                records,
                fork=fork,
                callbacks=called if callbacks else None,
                held_out=evaluated,
                extendable=True,
            )
        result = TrainResult(out, summary["steps"], summary)
    except TrainingStopped as stopped:
        log.info("%s; the same call resumes", stopped)
        losses = {"first_loss": finite(stopped.steps[0].loss), "last_loss": mean_loss(stopped.steps)}
        result = TrainResult(out, len(stopped.steps), {"steps": len(stopped.steps), **losses}, finished=False)
    called.on_end(result)
    return result


def read_files(config: TrainJobConfig) -> pa.Table:
    """Reads the records of the config's files; errors name them by their paths from the current folder.

    Raises:
        UserError: on the first bad record, with file and line.
    """
    return _read({f"data[{number}]": file for number, file in enumerate(config.files)}, config)


def read_held_out(config: TrainJobConfig, records: pa.Table | None = None) -> "HeldOut | None":
    """Reads the records that a training is evaluated on, and its scorers; None where it is not evaluated.

    Args:
        records: the records, where they are not in a file.

    Raises:
        UserError: on the first bad record, or a scorer that cannot be used.
    """
    from posttrain.train.evaluation import HeldOut

    evaluate = config.train.evaluate
    if evaluate.data is None:
        return None
    if evaluate.metrics and config.train.spec.classifier:
        what = f"{config.train.objective.name} makes a model that judges and does not answer"
        raise UserError(what, where=SCORERS_KEY, fix="leave them out: its loss is measured")
    score = held_out_score(evaluate.metrics, config.task)
    if records is None and isinstance(evaluate.data, str):
        records = _read({"held_out": evaluate.data}, config)
    return HeldOut(records, score)


def _sources(data: Any) -> dict[str, Any]:
    """Returns what must be read, each under the name that errors call it by.

    Raises:
        UserError: there is nothing to read.
    """
    # A list of dictionaries is one source, a list of anything else has several.
    if not isinstance(data, list | tuple) or any(isinstance(item, Mapping) for item in data):
        return {"data": data}
    if not data:
        raise UserError("holds no records", where="data", fix="put records into it, or name a file")
    return {f"data[{number}]": source for number, source in enumerate(data)} if len(data) > 1 else {"data": data[0]}


@contextmanager
def _record_indices(names: Sequence[str]) -> Iterator[None]:
    """Has errors that name a record in memory by source and line name it by its index."""
    try:
        yield
    except UserError as error:
        name, _, line = (error.where or "").rpartition(":")
        if name not in names or not line.isdigit():
            raise
        # Changed in place: its class says more than that it is the user's.
        error.where = record_index(name, int(line))
        error.args = (str(error).replace(f"{name}:{line}", error.where, 1),)
        raise


def _describe(source: Any) -> str:
    """Describes records in memory, for the config that is written."""
    return f"{type(source).__name__} in memory"


def _read(sources: Mapping[str, Any], config: TrainJobConfig) -> pa.Table:
    skipped: list[Problem] = []
    unused: dict[str, None] = {}
    tables: list[pa.Table] = []
    options: Any = {
        "columns": config.columns,
        "read_answer": config.task.read_answer,
        "skipped": skipped.append,
        "unused": lambda names: unused.update(dict.fromkeys(names)),
    }
    shown = []
    for name, source in sources.items():
        if not isinstance(source, str | Path):
            tables += read_memory(source, name, **options)
        elif str(source).startswith(HUB_PREFIX):
            name = str(source)
            for file in fetch_hub_dataset(name):
                tables += read(file, name=f"{name}/{file.name}", **options)
        else:
            path = to_data_path(source)
            name = display_path(path, Path.cwd())
            tables += read(path, name=name, **options)
        shown.append(name)
    if left := [column for column in unused if column not in columns_read(config.train)]:
        more = f" and {len(shown) - 1:,} more" if len(shown) > 1 else ""
        log.warning("  %s", unused_columns_note(shown[0] + more, left, config.columns, "`columns`"))
    if skipped:
        log.warning("  left out: %d records; the first: %s", len(skipped), skipped[0].error())
    read_records = concat(tables)
    if images := sum(image_name(meta) is not None for meta in read_records["meta"].to_pylist()):
        log.warning("  %d records name an image, which no model here sees: their text alone is trained on", images)
    return read_records
