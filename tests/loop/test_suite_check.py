"""Mistakes in a suite are found before any work."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.loop.config import load_config
from posttrain.loop.suites import check_suite_files
from posttrain.store.errors import UserError

Check = Callable[..., None]


@pytest.fixture
def check(small: Any, monkeypatch: pytest.MonkeyPatch) -> Check:
    """``check(data=...)`` checks a second suite, called extra."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def check_extra(**suite: Any) -> None:
        root = small(evaluate={"suites": {"test": {}, "extra": suite}})
        (root / "suite_check_scores.py").write_text("def length(answer, expected, prompt):\n    return len(answer)\n")
        (root / "bad.csv").write_text("text,label\nmy card is late,card\nmy card\n")
        (root / "other.csv").write_text("question,answer\nmy card is late,card\n")
        check_suite_files(load_config(root), root)

    return check_extra


@pytest.mark.parametrize(
    "suite",
    [
        {},
        {"data": "pool.csv", "columns": {"prompt": "text"}, "scorer": "perplexity"},
        {"data": "other.csv", "columns": {"prompt": "question", "completion": "answer"}},
        {"scorer": "python", "function": "suite_check_scores:length"},
    ],
)
def test_valid_suites_are_accepted(check: Check, suite: dict[str, Any]) -> None:
    check(**suite)


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ({"data": "none.csv"}, "evaluate.suites.extra.data: no such file: none.csv; check the path"),
        ({"data": "bad.csv"}, "bad.csv:3: 1 fields where the header names 2"),
        ({"data": "other.csv"}, "other.csv:1: there is no column `text`"),
        ({"scorer": "python", "function": "no_such:length"}, "evaluate.suites.extra.function: cannot import `no_such`"),
        ({"scorer": "python", "function": "suite_check_scores:width"}, "has no `width`"),
    ],
)
def test_invalid_suites_are_refused(check: Check, suite: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check(**suite)
    assert message in str(caught.value)
