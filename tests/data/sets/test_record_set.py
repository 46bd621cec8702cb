"""Duplicates, contradictions, missing answers and leaks: exact answers on planted records."""

from collections.abc import Callable
from functools import partial

import pyarrow as pa

from posttrain.data.records.record import RECORD, REJECTED
from posttrain.data.sets.pool_and_test import drop_labelled
from posttrain.data.sets.record_set import Transform
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.decontaminate import Decontaminate

Make = Callable[..., pa.Table]


def outcome(step: Transform, table: pa.Table) -> tuple[list[int], list[tuple[int, str, str, str]]]:
    """The kept lines and the (line, step, reason, detail) of the rejected; together they are the table."""
    result = step(table)
    assert result.kept.schema == RECORD
    assert result.rejected.schema == REJECTED
    assert sorted(result.kept["line"].to_pylist() + result.rejected["line"].to_pylist()) == table["line"].to_pylist()
    assert result.rejected.select(RECORD.names).equals(
        table.take(pa.array([line - 1 for line in result.rejected["line"].to_pylist()], pa.int64()))
    )
    rejections = [(row["line"], row["step"], row["reason"], row["detail"]) for row in result.rejected.to_pylist()]
    return result.kept["line"].to_pylist(), rejections


def test_labelled_records_are_dropped_from_the_pool(make: Make) -> None:
    labels = make(("z", "x"), ("b", "x"), source="labels")
    assert outcome(drop_labelled(labels), make(("a", None), ("b", None))) == (
        [1],
        [(2, "labelled", "already labelled", "the same input as labels:2")],
    )


def leaks(test: pa.Table, threshold: float | None) -> Transform:
    step = Decontaminate(ngram=None, threshold=threshold)
    return partial(apply_step, step, evaluation=test)


def test_leaks_name_the_test_record(make: Make) -> None:
    text = "where is the parcel that I ordered last week"
    test = make((text, "x", "anna"), ("my card was stolen", "y"), (text + "?", "x"), source="t")
    table = make(
        ("My card  was stolen", None),
        ("my card was stolen ", None),
        (text + "!", None),
        (text.replace("parcel", "phone"), None),
        ("good morning", None, "anna"),
        ("good evening", None, "otto"),
    )
    assert outcome(leaks(test, 0.9), table) == (
        [4, 6],
        [
            (1, "decontaminate", "like a test input", "similarity 1.00 to t:2"),
            (2, "decontaminate", "equals a test input", "the same input as t:2"),
            (3, "decontaminate", "like a test input", "similarity 0.98 to t:1"),
            (5, "decontaminate", "group of a test record", "its group `anna` is also that of t:1"),
        ],
    )
    assert outcome(leaks(test, None), table)[0] == [1, 3, 4, 6]
    assert outcome(leaks(test.slice(0, 0), 0.5), table)[0] == [1, 2, 3, 4, 5, 6]
    assert outcome(leaks(test, 0.5), table.slice(0, 0)) == ([], [])


def test_a_leak_names_the_most_similar_record_and_the_first_of_ties(make: Make) -> None:
    text = "where is the parcel that I ordered last week"
    test = make((text + "???", "x"), (text + "?", "x"), (text + "?", "y"), (text + "!?!", "x"), source="t")
    table = make((text, None))
    assert outcome(leaks(test, 0.8), table)[1] == [(1, "decontaminate", "like a test input", "similarity 0.98 to t:2")]
