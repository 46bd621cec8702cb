"""Suites: what models are measured on is compared as the training records are, whichever steps are listed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.store.errors import UserError

MAILS = [
    {"prompt": f"Please write to jonathan.longname{i}@subdomain.example-mail{i}.com", "completion": "a"}
    for i in range(5)
]
OTHERS = [{"prompt": f"other thing {i} entirely {i * 7919}", "completion": "b"} for i in range(30)]
FREE = {"prompt": "unrelated question on the moon", "completion": "q"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk, which only a power cut would punish."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def made(root: Path, suite: list[dict[str, Any]], *steps: Any, **values: Any) -> Version:
    write(root / "train.jsonl", [*MAILS, *OTHERS])
    write(root / "suite.jsonl", suite)
    given = {"name": "s", "files": ["train.jsonl"], "steps": [*steps], "suites": [{"file": "suite.jsonl"}]}
    return build({**given, "workspace": root, "engine": "inline", **values})


def num_rejected(version: Version) -> int:
    return sum(entry["count"] for entry in version.meta["funnel"] if entry["step"] == "decontaminate")


@pytest.mark.parametrize("before", [[], ["pii"], ["normalise", "pii"], ["exact", "conflicts", "pii"]])
def test_a_suite_goes_through_the_steps_that_rewrite(tmp_path: Path, before: list[str]) -> None:
    assert num_rejected(made(tmp_path, [*MAILS, FREE], *before, "decontaminate")) == 5


def test_records_that_a_step_would_refuse_are_still_measured_on(tmp_path: Path) -> None:
    twice = [OTHERS[0], {**OTHERS[0], "completion": "c"}, OTHERS[1], OTHERS[1], FREE]
    version = made(tmp_path, twice, "exact", "conflicts", "answers", "decontaminate", labels=["a", "b", "c", "q"])
    assert num_rejected(version) == 2


@pytest.mark.parametrize("steps", [[], ["exact"], ["pii"], ["pii", "decontaminate"], ["decontaminate"]])
def test_a_suite_that_is_wholly_shared_is_refused(tmp_path: Path, steps: list[str]) -> None:
    with pytest.raises(UserError, match=r"^suite\.jsonl: all 35 records of the suite stand in the training files"):
        made(tmp_path, [*MAILS, *OTHERS], *steps)
    assert not list((tmp_path / ".posttrain").glob("artifacts/*"))


@pytest.mark.parametrize("steps", [[], ["decontaminate"]])
def test_what_the_split_holds_out_is_of_the_files_too(tmp_path: Path, steps: list[str]) -> None:
    with pytest.raises(UserError, match=r"^suite\.jsonl: all 35 records of the suite stand in the training files"):
        made(tmp_path, [*MAILS, *OTHERS], *steps, splits={"test": 0.3})


@pytest.mark.parametrize(
    ("suite", "steps", "splits", "says"),
    [
        ([FREE], [{"length": {"input": {"min_words": 99}}}], None, "`length` rejected the most, 35: input too short"),
        ([*MAILS, *OTHERS, FREE], ["decontaminate"], {"test": 0.3}, r"`decontaminate` .* \d\d: equals a test input"),
    ],
)
def test_nothing_left_to_learn_from(tmp_path: Path, suite: Any, steps: Any, splits: Any, says: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.steps: no record is left to learn from; {says}$"):
        made(tmp_path, suite, *steps, splits=splits)
    assert not list((tmp_path / ".posttrain").glob("artifacts/*"))


@pytest.mark.parametrize("steps", [[], ["exact"], ["pii"]])
def test_a_suite_that_is_shared_in_part_needs_decontaminate(tmp_path: Path, steps: list[str]) -> None:
    says = (
        r"^suite\.jsonl: 5 training records have inputs that models are measured on, "
        r"the first: train\.jsonl:1 and suite\.jsonl:2; .*`decontaminate`"
    )
    with pytest.raises(UserError, match=says):
        made(tmp_path, [FREE, *MAILS], *steps)


def test_a_suite_apart_needs_no_step(tmp_path: Path) -> None:
    assert made(tmp_path, [FREE], "exact").count("train") == 35


def test_a_version_as_a_wholly_shared_suite(tmp_path: Path) -> None:
    made(tmp_path, [FREE], name="measured")
    for steps in ([], ["decontaminate"]):
        with pytest.raises(UserError, match=r"^measured: all 35 records of the suite"):
            made(tmp_path, [FREE], *steps, suites=[{"file": "measured"}])


def test_one_file_may_be_two_suites(tmp_path: Path) -> None:
    rows = [
        {"first": "not of the set", "second": OTHERS[3]["prompt"], "completion": "b"},
        {"first": "nor is this", "second": "the moon", "completion": "b"},
    ]
    suites = [{"file": "suite.jsonl", "columns": {"prompt": name}} for name in ("second", "first", "first")]
    version = made(tmp_path, rows, "decontaminate", suites=suites)
    assert num_rejected(version) == 1
