"""What every sink offers."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

from posttrain.store.errors import UserError
from posttrain.train.watch.findings import Decision
from posttrain.train.watch.values import StepValues


class Sink(Protocol):
    """A place that the values of each step and the decisions taken at it go to."""

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        """Take a step in."""

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        """The training goes on after ``steps``, all from 0 on: forget later ones, where the sink can.

        Args:
            told: the decisions that were written with some of them, by step.
        """

    def close(self) -> None:
        """Bring everything to its place and let go of what is open. Nothing is written after that."""


def first_line(error: Exception) -> str:
    """What a library says is wrong, without the rest of its explanation."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def optional(module: str, package: str, where: str) -> ModuleType:
    """Import a package that the program runs without.

    Args:
        package: what pip calls it.
        where: the config key that asks for it.

    Raises:
        UserError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        what = f"needs a package that is not installed ({error})"
        raise UserError(what, where=where, fix=f"pip install {package}") from None
