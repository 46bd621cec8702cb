"""Statistics of a batch of labels."""

from collections.abc import Callable

import pyarrow as pa

from posttrain.label.annotator import label_summary, with_answers


def test_the_summary_counts_classes_seconds_and_agreement(batch: Callable[..., pa.Table]) -> None:
    labelled = with_answers(batch("1", "2", "3", "4"), ["b", "a", "b", "c"], "anna", 2, [1.5, None, 2.0, 0.0])
    assert label_summary(labelled, ["b", "b", None, "c"]) == {
        "labels": 4,
        "classes": {"b": 2, "a": 1, "c": 1},
        "annotators": {"anna": 4},
        "seconds": 3.5,
        "compared": 3,
        "agreement": 2 / 3,
    }


def test_the_summary_without_suggestions_or_labels(batch: Callable[..., pa.Table]) -> None:
    summary = label_summary(batch("1"))
    assert (summary["annotators"], summary["agreement"], summary["seconds"]) == ({"unknown": 1}, None, None)
    assert label_summary(batch())["labels"] == 0
