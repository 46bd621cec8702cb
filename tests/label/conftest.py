"""Pool records from texts."""

from collections.abc import Callable

import pyarrow as pa
import pytest

from posttrain.data.records.record import assign_ids, records


@pytest.fixture
def batch() -> Callable[..., pa.Table]:
    """``batch("text", ...)``: unlabelled records of a file ``pool.csv``, one per line."""

    def table(*prompts: str) -> pa.Table:
        entries = [
            {
                "id": "",
                "input_id": "",
                "prompt": [{"role": "user", "content": prompt}],
                "completion": None,
                "rejected": None,
                "text": None,
                "group": None,
                "source": "pool.csv",
                "line": line,
                "meta": '{"channel": "web"}',
            }
            for line, prompt in enumerate(prompts, 1)
        ]
        return assign_ids(records(entries))

    return table
