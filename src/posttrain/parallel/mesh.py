"""The processes of one training: their number, the decisions that all take alike, and the sums over all."""

from dataclasses import dataclass
from typing import Self, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Mesh:
    """The processes that train one model together.

    A training has one process today, so every method returns its argument. The step passes through here whatever a
    process cannot know of the others, such as a full memory or a signal: a mesh of several processes will have a
    collective in each of these methods.

    Args:
        rank: number of this process, from 0.
        world_size: number of processes.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not below the world size {self.world_size}")

    @classmethod
    def single(cls) -> Self:
        """Returns the mesh of a training in one process."""
        return cls()

    def any(self, flag: bool) -> bool:
        """Returns True if the flag is True in one of the processes.

        A process that decided by itself would leave the others waiting for it.
        """
        return flag

    def from_first(self, value: Value) -> Value:
        """Returns the first process's value, such as a decision that all act on."""
        return value

    def sum(self, values: Value) -> Value:
        """Sums numbers, or dictionaries and tuples of numbers, over all processes."""
        return values

    def join_norms(self, norms: dict[str, float]) -> dict[str, float]:
        """Joins the L2 norms of the parts of a gradient that the processes hold."""
        return norms
