"""What the signs of a chart mean, in as many rows as they need."""

from collections.abc import Callable, Sequence

from posttrain.web.charts.svg import LETTER, element, text

Sign = Callable[[float, float], str]
"""A sign of about 12 pixels around a place."""

_ROW = 22


class Legend:
    """Signs with their names side by side.

    Args:
        entries: name and sign.
        width: that a row may take, in pixels.

    Attributes:
        height: in pixels.
    """

    def __init__(self, entries: Sequence[tuple[str, Sign]], width: float) -> None:
        self._rows: list[list[tuple[float, str, Sign]]] = [[]]
        x = 0.0
        for name, sign in entries:
            room = 34 + LETTER * len(name)
            if x and x + room > width:
                self._rows.append([])
                x = 0.0
            self._rows[-1].append((x, name, sign))
            x += room
        self.height = _ROW * len(self._rows)

    def at(self, left: float, top: float) -> str:
        """The legend with the middle of its first row at ``top``."""
        return "".join(
            sign(left + x + 6, top + _ROW * row) + text(name, left + x + 20, top + _ROW * row + 4, "soft")
            for row, entries in enumerate(self._rows)
            for x, name, sign in entries
        )


def box(class_: str) -> Sign:
    """A small box in the colour of a class."""
    return lambda x, y: element("rect", x=x - 6, y=y - 6, width=12, height=12, rx=2, class_=class_)
