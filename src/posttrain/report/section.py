"""Sections of a page as plain data: texts, tables and charts, which every page renders by one template."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from posttrain.report.charts.chart import Chart


@dataclass(frozen=True)
class Text:
    """A paragraph; text between backticks is shown as code.

    Attributes:
        style: ``""``, ``caption`` (what a section shows), ``note`` (a remark), ``sentence`` (gets a capital and a full
            stop), ``heading``, ``empty`` (nothing to show, and why), ``verdict`` or ``alert``.
    """

    kind: ClassVar[str] = "text"
    text: str
    style: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than a text.

    Attributes:
        text: Its text, ``note`` a remark below it, ``code`` an id or a name after both.
        chip: One of the gate's decisions, or another state with a colour of its own.
    """

    text: str = ""
    note: str = ""
    code: str = ""
    chip: str = ""


@dataclass(frozen=True)
class Table:
    """A table; without rows nothing is shown.

    Attributes:
        columns: Names of the columns.
        rows: A cell for each column.
        name: Name for readers without the picture.
        style: ``numbers`` (scrolls where it is wide), or ``cards`` (texts; a card for each row on a phone).
    """

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    name: str = ""
    style: str = "numbers"


Tile = tuple[str, str, str]
"""A headline number: value, name and remark."""


@dataclass(frozen=True)
class Tiles:
    """Headline numbers."""

    kind: ClassVar[str] = "tiles"
    rows: Sequence[Tile]


@dataclass(frozen=True)
class Pairs:
    """Names with their values."""

    kind: ClassVar[str] = "pairs"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Items:
    """A list: of each item a name and a text."""

    kind: ClassVar[str] = "items"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Rules:
    """Rules, each with its values and whether it holds."""

    kind: ClassVar[str] = "rules"
    rows: Sequence[tuple[str, str, bool]]


@dataclass(frozen=True)
class Quote:
    """A text of a record, with the place that it is from, and a remark."""

    kind: ClassVar[str] = "quote"
    place: str
    texts: Sequence[str]
    remark: str = ""


@dataclass(frozen=True)
class Grid:
    """Small charts side by side."""

    kind: ClassVar[str] = "grid"
    charts: Sequence["Chart"]


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown when the reader opens them.

    Attributes:
        title: Name, with a ``chip`` as of `Cell` and a ``remark`` beside it.
        blocks: The blocks.
        is_open: True if they are shown at once.
        id: Anchor for links; "" for none.
    """

    kind: ClassVar[str] = "fold"
    title: str
    blocks: Sequence["Block"]
    remark: str = ""
    chip: str = ""
    is_open: bool = False
    id: str = ""


Block = Text | Table | Tiles | Pairs | Items | Rules | Quote | Grid | Fold | Chart

Parts = Block | Iterable["Parts"] | None
"""Blocks, however they are grouped; None where there is nothing to show."""


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        title: Its heading.
        blocks: What it shows.
        empty: What it says where there are no blocks.
    """

    title: str
    blocks: Sequence[Block]
    empty: str = ""

    @classmethod
    def of(cls, title: str, caption: str, *parts: Parts, empty: str = "") -> Self:
        """Returns a section whose caption stands over the parts, if any of them has something to show."""
        shown = blocks(*parts)
        return cls(title, blocks(Text(caption, "caption"), shown) if shown else [], empty)

    @property
    def id(self) -> str:
        """Returns the anchor: ``personal-data`` of ``Personal data``, in every language."""
        return re.sub(r"\W+", "-", str(self.title).lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """A page that is a file of its own.

    Attributes:
        heading: Its heading, and its title.
        subject: A word on what it is about, above the heading.
        sentence: A sentence below the heading.
        tiles: Headline numbers.
        sections: Its sections.
        about: A sentence at the end.
    """

    heading: str
    subject: str
    sentence: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    about: str = ""


def blocks(*parts: Parts) -> list[Block]:
    """Returns the blocks among the parts, without those that have nothing to show."""
    listed: list[Block] = []
    for part in parts:
        if isinstance(part, Iterable):
            listed += blocks(*part)
        elif part is not None and not (isinstance(part, Text) and not part.text) and _has_rows(part):
            listed.append(part)
    return listed


def _has_rows(block: Block) -> bool:
    rows = getattr(block, "rows", None) if not isinstance(block, Chart) else True
    return bool(block.charts) if isinstance(block, Grid) else rows is None or bool(rows)
