"""Work that a power cut interrupts, and what it reports."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from file_layer import Promise


@dataclass
class Log:
    """What a run reports.

    Attributes:
        promise: Called with a name and a value once something is reported as stored.
        executed: Names of the work that was done, and not found finished.
    """

    promise: Callable[..., None] = lambda name, value=True: None
    executed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Workload:
    """Work to interrupt.

    Attributes:
        run: Does the work in a folder, or what is left of it; returns the outcome, which must always be the same. It
            promises what it has stored, as ``done`` what must not be done again.
        check: Yields what is wrong right after a power cut, given all promises; may change the files.
        prepare: Fills the folder before the work.
    """

    run: Callable[[Path, Log], Any]
    check: Callable[[Path, Sequence[Promise]], Iterator[str]]
    prepare: Callable[[Path], object] = lambda folder: None
