"""Records made by hand."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.normalise import identify
from posttrain.data.schema import records

Make = Callable[..., pa.Table]


@pytest.fixture
def make() -> Make:
    """``make(("prompt", "answer"), ("prompt", None, "group"), ...)``: records of a file ``f``, one a line."""

    def table(*rows: tuple[Any, ...], source: str = "f") -> pa.Table:
        made = []
        for line, (prompt, completion, *group) in enumerate(rows, 1):
            made.append(
                {
                    "id": "",
                    "input_id": "",
                    "prompt": [{"role": "user", "content": prompt}],
                    "completion": completion,
                    "rejected": None,
                    "text": None,
                    "group": group[0] if group else None,
                    "source": source,
                    "line": line,
                    "meta": "{}",
                }
            )
        return identify(records(made))

    return table
