"""The leak check of a split is not loosened by the settings of the decontamination step."""

import logging
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.data.split import SplitsConfig
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.versions.leaks import LeakCheck, require_no_overlap, training_records
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of

LONG = "the quick brown fox jumps over the lazy dog and runs far away from here today"


@pytest.mark.parametrize(
    ("step", "splits", "threshold", "ngram"),
    [
        (None, None, None, 13),
        (None, {}, 0.8, 13),
        (None, {"near_duplicates": None}, None, 13),
        ({}, {}, 0.8, 13),
        ({"threshold": 0.95}, {}, 0.8, 13),
        ({"threshold": 0.6}, {}, 0.6, 13),
        ({"threshold": None, "ngram": None}, {}, 0.8, 13),
        ({"threshold": 0.9}, {"near_duplicates": None}, 0.9, 13),
        ({"threshold": None}, {"near_duplicates": None}, None, 13),
        ({"ngram": 8}, None, 0.8, 8),
    ],
)
def test_the_stricter_setting_applies(step: Any, splits: Any, threshold: float | None, ngram: int) -> None:
    check = LeakCheck.from_steps(
        [] if step is None else [Decontaminate(**step)], None if splits is None else SplitsConfig(**splits)
    )
    assert (check.threshold, check.ngram) == (threshold, ngram)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0.95}, "`decontaminate: {threshold: 0.8}`"),
        ({"threshold": None, "ngram": None}, "`decontaminate: {threshold: 0.8, ngram: 13}`"),
        ({}, "when the version is built again"),
    ],
)
def test_the_fix_names_the_settings_that_let_records_pass(settings: Any, message: str) -> None:
    assert message in LeakCheck.from_steps([Decontaminate(**settings)], SplitsConfig()).fix


def test_applying_the_fix_leaves_nothing_to_fix() -> None:
    lax = Decontaminate(threshold=None, ngram=None)
    assert "{threshold: 0.8, ngram: 13}" in LeakCheck.from_steps([lax], SplitsConfig()).fix
    strict = Decontaminate(threshold=0.8, ngram=13)
    assert "settings" not in LeakCheck.from_steps([strict], SplitsConfig()).fix


@pytest.mark.parametrize(
    ("training_text", "test_text", "message"),
    [
        ("Where is it?", "Where  is it? ", "the same input"),
        (f"one {LONG} two three", f"four five {LONG}", "13-gram"),
    ],
)
def test_training_records_are_compared_with_the_test_set(training_text: str, test_text: str, message: str) -> None:
    train = table_of({"prompt": "Something else", "source": "a.jsonl"}, {"prompt": training_text, "source": "a.jsonl"})
    test = table_of({"prompt": test_text, "source": "t.jsonl"})
    with pytest.raises(UserError, match=r"a\.jsonl:2 \(train\): .* t\.jsonl:1 \(test\)") as error:
        require_no_overlap(train, {"test": test}, "train@v3", [])
    assert message in str(error.value)
    assert str(error.value).startswith("train@v3: 1 record of train overlaps with test")
    require_no_overlap(train.slice(0, 1), {"test": test}, "train@v3", [])


def test_a_step_without_ngrams_does_not_hide_a_leak(tmp_path: Path) -> None:
    rows = [f'{{"text": "{number * 7919} {LONG} {number * 104729}"}}' for number in range(12)]
    (tmp_path / "f.jsonl").write_text("\n".join(rows), encoding="utf-8")
    steps = [{"decontaminate": {"ngram": None, "threshold": None}}]
    splits = {"test": 0.5, "near_duplicates": None}
    version = build_version(tmp_path, steps, splits)
    with pytest.raises(UserError, match=r"^s: \d+ records of train overlap with test.*`decontaminate: \{ngram: 13\}`"):
        training_records(version, "s")


def test_disabled_checks_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f'{{"text": "{number * 7919}", "group": "g{number % 3}"}}' for number in range(12)]
    (tmp_path / "f.jsonl").write_text("\n".join(rows), encoding="utf-8")
    version = build_version(tmp_path, ["exact"], {"test": 0.5, "near_duplicates": None, "group": False})
    with caplog.at_level(logging.WARNING, logger="posttrain"):
        training_records(version, "s")
    (message,) = caplog.messages
    assert message == (
        "s: the check before training does not look for shared groups (`splits.group` is false) "
        "and near duplicates (no threshold is set)"
    )


def build_version(root: Path, steps: list[Any], splits: dict[str, Any]) -> Version:
    config = {"name": "s", "files": ["f.jsonl"], "steps": steps, "splits": splits, "workspace": root}
    return build({**config, "engine": "inline"})
