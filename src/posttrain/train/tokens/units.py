"""Units by their places, as all that holds some gives them."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:  # torch comes with it
    from posttrain.models.packing import Unit


class Units(Sequence["Unit"]):
    """Units that are read when they are asked for."""

    @abstractmethod
    def unit(self, row: int) -> "Unit":
        """The unit of a row from 0 on that there is."""

    @overload
    def __getitem__(self, place: int) -> "Unit": ...
    @overload
    def __getitem__(self, place: slice) -> Sequence["Unit"]: ...
    def __getitem__(self, place: int | slice) -> "Unit | Sequence[Unit]":
        rows = range(len(self))[place]  # negative places, and an IndexError where there is none
        return self.unit(rows) if isinstance(rows, int) else [self.unit(row) for row in rows]
