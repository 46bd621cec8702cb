"""Records made by hand."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from posttrain.testing.steps import table_of

Make = Callable[..., pa.Table]


@pytest.fixture
def make() -> Make:
    """``make(("prompt", "answer"), ("prompt", None, "group"), ...)``: records of a file ``f``, one per line."""

    def table(*rows: tuple[Any, ...], source: str = "f") -> pa.Table:
        records = (zip(("prompt", "completion", "group"), row, strict=False) for row in rows)
        return table_of(*({**dict(row), "source": source} for row in records))

    return table
