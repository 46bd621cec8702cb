"""Trains outside of a workspace: one folder holds the model, its config and its metrics."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import yaml
from pydantic import Field

import posttrain
from posttrain import __version__
from posttrain.models.precision import COMPUTE_PRECISIONS, choose_precision, count_weights
from posttrain.models.sources import DEMO_MODEL, TINY_MODEL, fetch_once, locate
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, is_user_mistake
from posttrain.store.files import (
    disk_errors,
    hold_lock,
    make_folder,
    remove_tree,
    sync_file,
    sync_folder,
    sync_tree,
    write_atomically,
)
from posttrain.store.hashing import digest, file_digest, file_stats
from posttrain.store.hub import HUB_PREFIX
from posttrain.store.paths import locate_path
from posttrain.store.section import Section
from posttrain.train.config import OPERATIONAL_SECTIONS, TrainConfig
from posttrain.train.data.tokenise import content_digest
from posttrain.train.key_aliases import KEY_ALIASES, VALUE_ALIASES
from posttrain.train.objectives.config import TEACHER_KEY

if TYPE_CHECKING:
    import numpy as np

    from posttrain.train.callbacks import CallbackList
    from posttrain.train.evaluation import HeldOut

log = logging.getLogger("posttrain")

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
TUNED = "autotune.json"
"""The file next to a config that was tuned for a later training in the same folder."""
_HELD_OUT_KEY = "train.evaluate.data"
_WORK_FOLDER = ".training"
_STARTED = "started.json"
"""Settings, contents and versions at the start of a training, in its work folder."""
_KEPT = ("checkpoints", "notes.json")
"""The files of a finished training that a longer one continues from."""
_LIBRARIES = ("torch", "transformers", "peft")
_CHANGES_SHOWN = 3  # in an error


class TrainJobConfig(Section):
    """Everything that determines a training outside of a loop."""

    key_list = "posttrain config keys"
    key_aliases = KEY_ALIASES
    value_aliases = VALUE_ALIASES

    seed: int = Field(17, ge=0, description="Fixes every random choice.")
    model: str = Field(description="A folder, a .gguf file, a Hub id, `smollm2-135m` or `tiny`.")
    data: str | Annotated[list[str], Field(min_length=1)] = Field(
        description="A file of records or its URL, `hub:OWNER/NAME:SPLIT`, several that are read one after another, "
        "or a dataset version of the workspace."
    )
    columns: dict[str, str] | None = Field(None, description="Column of each field, such as prompt: question.")
    task: TaskConfig = Field(TaskConfig(), description="The task: system message, template, labels.")
    train: TrainConfig = Field(TrainConfig(), description="The training.")

    @property
    def files(self) -> list[str]:
        """The files that ``data`` names."""
        return self.data if isinstance(self.data, list) else [self.data]

    def with_paths_from(self, root: Callable[[str], Path]) -> "TrainJobConfig":
        """Resolves the paths of model, data and teacher, and reads the labels from their file.

        Args:
            root: returns the folder that the path under a key, such as ``task.labels``, is relative to.

        Raises:
            UserError: a path leads to nothing, or to something else.
        """
        model = self.model
        if model not in (TINY_MODEL, DEMO_MODEL):
            model = locate(model, root("model"), weights=False)
        data = [_resolve(name, root("data")) for name in self.files]
        return self.model_copy(
            update={
                "model": model,
                "data": data if isinstance(self.data, list) else data[0],
                "task": self.task.with_labels_from(root("task.labels")),
                "train": self.train.with_teacher_from(root(TEACHER_KEY)).with_held_out(
                    lambda name: _resolve(name, root(_HELD_OUT_KEY))
                ),
            }
        )


def _resolve(name: str, root: Path) -> str:
    """Resolves the path of a file; leaves URLs, Hub datasets, and versions, whose names have an @ or no suffix."""
    if "://" in name or name.startswith(HUB_PREFIX):
        return name
    path = locate_path(root, name).resolve()
    return str(path) if name and (path.exists() or (path.suffix and "@" not in name)) else name


def train_standalone(
    out: Path,
    config: TrainJobConfig,
    records: pa.Table,
    base: Path | None = None,
    *,
    fork: bool = False,
    callbacks: "CallbackList | None" = None,
    held_out: "HeldOut | None" = None,
    extendable: bool = False,
    difficulties: "np.ndarray | None" = None,
    weights: "np.ndarray | None" = None,
) -> dict[str, Any]:
    """Trains into ``out``, resuming where an earlier call stopped.

    Args:
        out: gets the model in Hugging Face layout, ``config.yaml`` with every value, ``metrics.jsonl`` with one line an
            optimiser step, and ``summary.json``. One process at a time trains into it.
        config: settings of the training.
        records: rows of the record schema.
        base: folder of the initial model; None: that of the config, fetched into ``out`` while it trains.
        fork: resume although config, data or code have changed since.
        callbacks: called after each step and at each checkpoint.
        held_out: what the model is evaluated on while it trains; None: it is not evaluated.
        extendable: keep the last checkpoints, where a longer training may continue from them, and continue so.
        difficulties: float [records], higher is harder, in place of the column that the curriculum names.
        weights: float [records], of the records in the loss, times the column that the config names.

    Returns:
        The summary: counts and losses of `stage.train`, and the final ``micro_batch_tokens``.

    Raises:
        UserError: the folder holds something else, another process trains into it, or config, data or code have changed
            since the training began.
        WorkError: training fails and cannot be recovered.
        TrainingStopped: a callback asked to stop; the next call resumes.
    """
    if (processes := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        # Each of them would train the whole model, and all but one end at the lock.
        what = f"trains in one process, and {processes} were started"
        raise UserError(what, where="WORLD_SIZE", fix="call it without torchrun, accelerate or srun")
    work = out / _WORK_FOLDER
    if out.exists() and not work.is_dir() and not (out.is_dir() and _is_empty(out)):
        raise UserError("is not the folder of a training", where=str(out), fix="name another --out")
    with _clean_up_on_user_error(out):
        make_folder(work)
        with hold_lock(work / "lock", busy_message="is being trained by another process"):
            config = _with_precision(out, config)
            values = {"difficulties": difficulties, "weights": weights}
            extendable = extendable and config.train.is_extendable
            evaluated = None if held_out is None else held_out.records
            _check_identity(out, _identity(config, records, evaluated, values), fork, extendable)
            options = {"callbacks": callbacks, "held_out": held_out, "keep_end": extendable, **values}
            return _train(out, config, records, base, options)


@contextmanager
def _clean_up_on_user_error(out: Path) -> Iterator[None]:
    """Restores ``out`` if a user's mistake ends a new training before its first checkpoint."""
    work = out / _WORK_FOLDER
    new, before = not work.exists(), list(out.iterdir()) if out.exists() else []
    new_folders = [folder for folder in (out, *out.absolute().parents) if not folder.exists()]
    try:
        yield
    except UserError as error:
        # Fetched weights are kept: the next attempt needs them.
        if (
            new
            and is_user_mistake(error)
            and not (work / "base").exists()
            and not (work / "scratch" / "checkpoints").exists()
        ):
            for path in set(out.iterdir()).difference(before) if out.is_dir() else ():
                remove_tree(path) if path.is_dir() else path.unlink()
            with suppress(OSError):  # it holds a file of somebody else
                for folder in new_folders:
                    folder.rmdir()
        raise


def _with_precision(out: Path, config: TrainJobConfig) -> TrainJobConfig:
    """Replaces precision ``auto`` by the one that the training began with, or by this machine's if it begins now."""
    if config.train.precision != "auto":
        return config
    started = out / _WORK_FOLDER / _STARTED
    # A training that is resumed elsewhere must end the same, whatever is faster there.
    recorded = _read(started)["train"]["precision"] if started.exists() else None
    if recorded not in COMPUTE_PRECISIONS:
        recorded = choose_precision(count_weights(Path(config.model)))
    return config.model_copy(update={"train": config.train.with_precision(recorded)})


def _train(
    out: Path,
    config: TrainJobConfig,
    records: pa.Table,
    base: Path | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    # Here, as the command line reads this module's config: torch would make `posttrain train --help` wait for seconds.
    from posttrain.train.evaluation import read_held_out_set
    from posttrain.train.lora import check_ranks, set_base_model
    from posttrain.train.monitor.sinks import open_sinks
    from posttrain.train.objectives.build import record_shape
    from posttrain.train.recovery import read_recovery_log
    from posttrain.train.shape import check_trained_shape
    from posttrain.train.stage import train
    from posttrain.train.training_set import read_training_set

    work = out / _WORK_FOLDER
    if (out / SUMMARY).exists():
        log.info("this training is done")
        return _read(out / SUMMARY)
    shape = record_shape(config.train, records)
    if shape == "completion":
        _check_answers(records)
    if shape == "completion" and (count := _count_thumbs_down(records)):
        raise UserError(
            f"{count:,} of {records.num_rows:,} records have `label: false`, and {config.train.objective.name} would "
            "learn their answers",
            where="train.objective",
            fix="train with kto, or leave these records out",
        )
    _write_config(out, config)
    if shape != "pair" and records["rejected"].null_count < records.num_rows:
        log.warning("%s learns the chosen answers alone; dpo and others learn from both", config.train.objective.name)
    source = locate(config.model, Path(), weights=False)
    if base is None:
        base = work / "base" / "model"
        if not (Path(source).is_dir() or base.parent.exists()):
            # Report a mistake before gigabytes of weights are fetched.
            check_trained_shape(source, config.train)
            check_ranks(source, config.train)
            read_training_set(source, records, config.train, config.task, work / "scratch")
            if (held_out := options["held_out"]) and held_out.records is not None:
                read_held_out_set(source, held_out.records, config.train, config.task, work / "scratch")
        base = fetch_once(source, base)
    sinks = open_sinks(config.train.sinks, out / METRICS, run=f"{out.name}-{digest(str(out.resolve()))[:8]}")
    try:
        summary = train(
            base,
            records,
            config.train,
            config.task,
            seed=config.seed,
            out=work / "model",
            scratch=work / "scratch",
            sink=sinks,
            profile=out / "profile",
            **options,
        )
    finally:
        sinks.close()
    adapter = work / "model" / "adapter"
    if adapter.is_dir() and source != TINY_MODEL and not source.endswith(".gguf"):
        set_base_model(adapter, source)
    recovery_log, requested = read_recovery_log(work / "scratch"), config.train.micro_batch_tokens
    tokens = recovery_log.auto_budget if requested == "auto" else requested
    assert tokens is not None, "it was decided before the first step"
    summary["micro_batch_tokens"] = recovery_log.limit_tokens(tokens)
    resolved = config.train.model_copy(update={"micro_batch_tokens": summary["micro_batch_tokens"]})
    _write_config(out, config.model_copy(update={"train": resolved}))
    _move_model(work / "model", out)
    sync_file(out / METRICS)
    # The summary is written last: it marks the training as done.
    write_atomically(out / SUMMARY, json.dumps(summary, indent=1).encode())
    scratch = work / "scratch"
    parts = [part for part in scratch.iterdir() if part.name not in _KEPT] if options["keep_end"] else [scratch]
    for part in (work / "base", work / "model", *parts):
        if part.exists():
            remove_tree(part) if part.is_dir() else part.unlink()
    return summary


def _check_answers(records: pa.Table) -> None:
    """Raises a UserError that counts the records with an input and no answer, if there are several."""
    unanswered = records.filter(pc.and_(pc.is_null(records["completion"]), pc.is_valid(records["prompt"])))
    if unanswered.num_rows > 1:
        from posttrain.train.data.encoding import record_error

        # One alone is refused, with the same remedies, as it is tokenised.
        what = f"it is the first of {unanswered.num_rows:,} records without an answer to learn, of {records.num_rows:,}"
        fix = "say which column holds it (`columns`), give them one, or take them out of the data"
        raise record_error(unanswered.slice(0, 1).to_pylist()[0], what, fix=fix)


def _count_thumbs_down(records: pa.Table) -> int:
    """Counts the records whose answer is marked as a bad one, but for 0, which may be the number of a class."""
    # Parsed only where the text has both words: most records have another meta or none.
    marked = [meta for meta in records["meta"].to_pylist() if meta and '"label"' in meta and "false" in meta.lower()]
    return sum(str(json.loads(meta).get("label")).strip().lower() == "false" for meta in marked)


def _write_config(out: Path, config: TrainJobConfig) -> None:
    write_atomically(out / CONFIG, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode())


def _move_model(model: Path, out: Path) -> None:
    """Moves a model's files into ``out``, over those that a killed attempt moved, and sync them."""
    with disk_errors(out):
        sync_tree(model)
        for file in list(model.iterdir()):
            if (out / file.name).is_dir():  # a rename does not replace a folder with files
                remove_tree(out / file.name)
            file.replace(out / file.name)
        sync_folder(out)


def _check_identity(out: Path, identity: dict[str, Any], fork: bool, extendable: bool) -> None:
    """Writes the training's identity, or compare it with the one written at its start."""
    work, done = out / _WORK_FOLDER, (out / SUMMARY).exists()
    started = work / _STARTED
    longer = started.exists() and _is_longer(_read(started), identity)
    saved = any((work / "scratch" / "checkpoints").glob("step-*"))
    if longer and extendable and (saved or not done):
        # First: after a kill before the next line the training is not done, and still the longer one.
        (out / SUMMARY).unlink(missing_ok=True)
        write_atomically(started, json.dumps(identity, indent=1).encode())
    if started.exists():
        changes = list(_changes(_read(started), identity))
        trained = done or any((work / "scratch" / "checkpoints").glob("*"))
        more = f", and {len(changes) - _CHANGES_SHOWN} more" if len(changes) > _CHANGES_SHOWN else ""
        listed = ", ".join(changes[:_CHANGES_SHOWN]) + more
        if changes and done:
            fix = "name another --out"
            if longer:
                constant = "only a constant schedule, with a warm-up of 0 or of whole steps, can be trained on"
                fix += f"; {'no checkpoint is left to train on from' if extendable else constant}"
            raise UserError(f"is done, and began with other settings: {listed}", where=str(out), fix=fix)
        if changes and trained and not fork:
            fix = "take that back, resume all the same with --fork, or name another --out"
            raise UserError(f"this training began with other settings: {listed}", where=str(out), fix=fix)
        if changes:
            remove_tree(work / "base")  # perhaps of another model
        if changes and not trained:  # as after a corrected mistake
            remove_tree(work / "scratch")
    write_atomically(started, json.dumps(identity, indent=1).encode())


def _is_longer(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether a training differs from an earlier one in its length alone, and is longer."""
    lengths = [(each["train"].get("max_steps"), each["train"]["epochs"]) for each in (before, now)]
    (old_steps, old_epochs), (steps, epochs) = lengths
    longer = epochs > old_epochs if steps is None is old_steps else None not in (steps, old_steps) and steps > old_steps
    old, new = ({**each, "train": {**each["train"], "max_steps": None, "epochs": None}} for each in (before, now))
    return longer and not any(_changes(old, new))


def _is_empty(out: Path) -> bool:
    """Returns whether a folder holds nothing but the tuned settings of a training."""
    names = {path.name for path in out.iterdir()}
    return not names or (TUNED in names and names <= {TUNED, CONFIG})


def _identity(
    config: TrainJobConfig,
    records: pa.Table,
    held_out: pa.Table | None,
    values: "Mapping[str, np.ndarray | None]",
) -> dict[str, Any]:
    teacher = config.train.teacher
    return {
        # Without paths and settings that change no result: the records count by their content.
        **config.model_dump(
            mode="json",
            exclude={
                "train": dict.fromkeys(OPERATIONAL_SECTIONS, True)
                | ({} if held_out is None else {"evaluate": {"data"}}),
                **{"data": True, "columns": True},
            },
        ),
        "contents": {
            "records": content_digest(records),
            **({} if held_out is None else {"held-out data": content_digest(held_out)}),
            **{name: digest(column.tolist()) for name, column in values.items() if column is not None},
            "model": _files_digest(config.model),
            "teacher": None if teacher is None else _files_digest(teacher),
            "code": _code_digest(),
        },
        "version": __version__,
        "libraries": {name: version(name) for name in _LIBRARIES},
    }


@cache
def _code_digest() -> str:
    """Digests this program's own files, once a process: it runs the code that it began with."""
    # The version alone does not do: it stays the same while the code is worked on.
    root = Path(posttrain.__file__).parent
    return digest([[str(file.relative_to(root)), file_digest(file)] for file in sorted(root.rglob("*.py"))])


def _files_digest(model: str) -> str | None:
    """Digests the names, sizes and times of a model's files; None for a model by name."""
    path = Path(model)
    return digest(file_stats(path)) if path.is_absolute() else None


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, f"{path}{key}.")
        elif old != new and path == "contents.":
            yield f"the content of {'the data' if key == 'records' else f'the {key}'} has changed"
        elif old != new:
            yield f"`{path}{key}` was {json.dumps(old)} and is {json.dumps(new)}"


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_bytes())
    return values
