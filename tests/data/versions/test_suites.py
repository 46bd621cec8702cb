"""Suites: evaluation records pass the rewriting steps of the training records before the two are compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.store.errors import UserError

MAILS = [
    {"prompt": f"Please write to jonathan.longname{i}@subdomain.example-mail{i}.com", "completion": "a"}
    for i in range(5)
]
THINGS = [{"prompt": f"other thing {i} entirely {i * 7919}", "completion": "b"} for i in range(30)]
FREE = {"prompt": "unrelated question on the moon", "completion": "q"}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_version(root: Path, suite: list[dict[str, Any]], *steps: Any, **values: Any) -> Version:
    write(root / "train.jsonl", [*MAILS, *THINGS])
    write(root / "suite.jsonl", suite)
    config = {"name": "s", "files": ["train.jsonl"], "steps": [*steps], "suites": [{"file": "suite.jsonl"}]}
    return build({**config, "workspace": root, "engine": "inline", **values})


def num_rejected(version: Version) -> int:
    return sum(entry["count"] for entry in version.meta["funnel"] if entry["step"] == "decontaminate")


@pytest.mark.parametrize("steps", [[], ["pii"], ["normalise", "pii"], ["exact", "conflicts", "pii"]])
def test_a_suite_goes_through_the_steps_that_rewrite(tmp_path: Path, steps: list[str]) -> None:
    assert num_rejected(build_version(tmp_path, [*MAILS, FREE], *steps, "decontaminate")) == 5


def test_filters_do_not_drop_suite_records(tmp_path: Path) -> None:
    suite = [THINGS[0], {**THINGS[0], "completion": "c"}, THINGS[1], THINGS[1], FREE]
    version = build_version(
        tmp_path, suite, "exact", "conflicts", "answers", "decontaminate", labels=["a", "b", "c", "q"]
    )
    assert num_rejected(version) == 2


@pytest.mark.parametrize("steps", [[], ["exact"], ["pii"], ["pii", "decontaminate"], ["decontaminate"]])
def test_a_suite_inside_the_training_files_raises(tmp_path: Path, steps: list[str]) -> None:
    with pytest.raises(UserError, match=r"^suite\.jsonl: all 35 records of the suite stand in the training files"):
        build_version(tmp_path, [*MAILS, *THINGS], *steps)
    assert not list((tmp_path / ".posttrain").glob("artifacts/*"))


@pytest.mark.parametrize("steps", [[], ["decontaminate"]])
def test_a_suite_inside_the_files_of_a_split_set_raises(tmp_path: Path, steps: list[str]) -> None:
    with pytest.raises(UserError, match=r"^suite\.jsonl: all 35 records of the suite stand in the training files"):
        build_version(tmp_path, [*MAILS, *THINGS], *steps, splits={"test": 0.3})


@pytest.mark.parametrize(
    ("suite", "steps", "splits", "message"),
    [
        ([FREE], [{"length": {"input": {"min_words": 99}}}], None, "`length` rejected the most, 35: input too short"),
        ([*MAILS, *THINGS, FREE], ["decontaminate"], {"test": 0.3}, r"`decontaminate` .* \d\d: equals a test input"),
    ],
)
def test_an_empty_training_set_raises(tmp_path: Path, suite: Any, steps: Any, splits: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.steps: no record is left to learn from; {message}$"):
        build_version(tmp_path, suite, *steps, splits=splits)
    assert not list((tmp_path / ".posttrain").glob("artifacts/*"))


@pytest.mark.parametrize("steps", [[], ["exact"], ["pii"]])
def test_a_suite_that_overlaps_in_part_needs_decontaminate(tmp_path: Path, steps: list[str]) -> None:
    message = (
        r"^suite\.jsonl: 5 training records have inputs that models are measured on, "
        r"the first: train\.jsonl:1 and suite\.jsonl:2; .*`decontaminate`"
    )
    with pytest.raises(UserError, match=message):
        build_version(tmp_path, [FREE, *MAILS], *steps)


def test_a_suite_without_overlap_needs_no_step(tmp_path: Path) -> None:
    assert build_version(tmp_path, [FREE], "exact").count("train") == 35


def test_a_version_as_a_suite_inside_the_training_files_raises(tmp_path: Path) -> None:
    build_version(tmp_path, [FREE], name="measured")
    for steps in ([], ["decontaminate"]):
        with pytest.raises(UserError, match=r"^measured: all 35 records of the suite"):
            build_version(tmp_path, [FREE], *steps, suites=[{"file": "measured"}])


def test_one_file_can_be_two_suites(tmp_path: Path) -> None:
    rows = [
        {"first": "not of the set", "second": THINGS[3]["prompt"], "completion": "b"},
        {"first": "nor is this", "second": "the moon", "completion": "b"},
    ]
    suites = [{"file": "suite.jsonl", "columns": {"prompt": name}} for name in ("second", "first", "first")]
    version = build_version(tmp_path, rows, "decontaminate", suites=suites)
    assert num_rejected(version) == 1
