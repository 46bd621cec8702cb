"""Tables of answers for the tests of quality measures."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from posttrain.label.answers import ANSWERS, Votes, encode_votes

START = datetime(2026, 3, 2, 9, tzinfo=UTC)


def answer_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Build an ANSWERS table, a minute between rows, from what each row states besides the defaults."""
    filled = [
        {
            **{"item": 0, "record": "r", "batch": "b", "annotator": "anna", "answer": "x", "expected": None},
            **{"resolution": None, "resolved_by": None, "suggestion": None, "planted": False},
            **{"seconds": None, "confidence": None, "checked": False, "deciding": False, "guideline": 1},
            "created_at": START + timedelta(minutes=number),
            **row,
        }
        for number, row in enumerate(rows)
    ]
    return pa.Table.from_pylist(filled, schema=ANSWERS)


def votes_of(answers: Mapping[str, Sequence[Any]]) -> Votes:
    """Encode the answers of each annotator to items 0, 1, …; None where they gave none."""
    rows = [
        {"item": item, "annotator": name, "answer": str(answer)}
        for name, given in answers.items()
        for item, answer in enumerate(given)
        if answer is not None
    ]
    return encode_votes(answer_table(rows))
