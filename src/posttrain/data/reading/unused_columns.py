"""Columns that a file has and its records are not made of."""

from collections.abc import Mapping
from itertools import islice

from posttrain.data.reading.conversion import Conversion
from posttrain.data.reading.files import DELIMITERS, rows, uniform
from posttrain.data.reading.paths import Place, file_format
from posttrain.data.reading.problem import listed
from posttrain.data.reading.row import Row

_ROWS = 20


def unused_columns(path: Place, name: str, columns: Mapping[str, str] | None) -> list[str]:
    """The columns that only ``meta`` keeps, by the first rows; none where no record can be made of them."""
    conversion = Conversion(
        name, columns, answers=False, cells=file_format(path) in DELIMITERS, same_columns=uniform(path)
    )
    found: dict[str, None] = {}
    for row in islice(rows(path, name), 1 if uniform(path) else _ROWS):
        if isinstance(row, Row):
            for _ in conversion([row]):
                found.update(dict.fromkeys(conversion.unused))
    return list(found)


def note(name: str, unused: list[str], columns: Mapping[str, str] | None) -> str:
    """One line about them: what becomes of them, and how one is used."""
    verb = "is" if len(unused) == 1 else "are"
    free = "prompt" if columns and "prompt" not in columns else "completion"
    how = f"`data.columns` or --column NAME=COLUMN, such as prompt=question, {free}={unused[0]}"
    if free == "prompt":
        how = f"`data.columns` or --column NAME=COLUMN, such as prompt={unused[0]}"
    return f"{name}: {listed(unused)} {verb} not used, only kept in `meta`; name what is with {how}"
