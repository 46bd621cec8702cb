"""The backends that run a function, by the name of the engine."""

from collections.abc import Callable, Collection

from posttrain.jobs.engines import available_cores
from posttrain.jobs.gpus import has_gpu
from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry
from posttrain.tune.backends.base import Backend, TrialFunction

SILENCE = 3600.0
"""Seconds without a report after which a trial counts as hanging."""

BACKENDS: Registry[Callable[[TrialFunction, int, float], Backend]] = Registry(
    "engine",
    "posttrain.backends",
    {
        "inline": "posttrain.tune.backends.registry:inline",
        "processes": "posttrain.tune.backends.processes:ProcessBackend",
        "ray": "posttrain.tune.backends.ray_cluster:RayBackend",
        "slurm": "posttrain.tune.backends.slurm:SlurmBackend",
    },
)
"""A function of the function that runs a trial, the number of workers, and the seconds of silence, by name."""


def check_engine(name: str, workers: int | None = None, section: str = "--") -> None:
    """Raises a `UserError` if there is no such engine, or it cannot have so many workers.

    Args:
        name: of the engine.
        workers: trials at a time; None: as many as there are cores.
        section: of a config, before the names of keys in errors, such as ``tune.``.
    """
    if name not in BACKENDS:
        raise UserError(f"there is no engine `{name}`", where=f"{section}engine", fix=suggest(name, BACKENDS))
    if workers is not None and workers < 1:
        raise UserError(f"{workers} workers cannot work", where=f"{section}workers", fix="give at least 1")
    if name == "inline" and workers is not None and workers > 1:
        raise UserError(
            f"inline has no {workers} workers", where=f"{section}workers", fix=f"use {section}engine processes"
        )


def check_memory(names: Collection[str], engine: str, where: str) -> None:
    """Raises a `UserError` if the engine does not measure the memory of a trial that is asked for.

    Args:
        names: what is asked for, such as ``memory_bytes`` or ``gpu_memory_bytes``; other names do not matter.
        engine: runs the trials.
        where: the key, named in errors.
    """
    if "memory_bytes" in names and engine == "inline":
        what = "`memory_bytes` of a trial is not known where all trials run in one process"
        raise UserError(what, where=where, fix="use --engine processes")
    if "gpu_memory_bytes" in names and engine in ("inline", "processes") and not has_gpu():
        what = "`gpu_memory_bytes` of a trial is not known where there is no GPU"
        raise UserError(what, where=where, fix="use memory_bytes")


def open_backend(name: str, function: TrialFunction, workers: int | None = None, silence: float = SILENCE) -> Backend:
    """Opens a backend.

    Args:
        name: its name.
        function: runs a trial.
        workers: trials at a time; by default as many as there are cores.
        silence: seconds without a report after which a trial counts as hanging, where it can be ended.

    Raises:
        UserError: as `check_engine`, or the function cannot be sent to another process.
    """
    check_engine(name, workers)
    return BACKENDS.load(name, "--engine")(function, workers or available_cores(), silence)


def inline(function: TrialFunction, workers: int, silence: float) -> Backend:
    """Returns the backend of this process, which has one worker and cannot end a call."""
    from posttrain.tune.backends.inline import InlineBackend

    return InlineBackend(function)
