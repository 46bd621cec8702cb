"""How strictly a split is proven: the settings of the step that makes it sound do not loosen the proof."""

import logging
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.data.contamination.decontaminate import Decontaminate
from posttrain.data.split import SplitsConfig
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
        ({"ngram": 8, "share": 0.5}, None, 0.8, 8),
    ],
)
def test_the_stricter_setting_counts(step: Any, splits: Any, threshold: float | None, ngram: int) -> None:
    proof = LeakCheck.of(
        None if step is None else Decontaminate(**step), None if splits is None else SplitsConfig(**splits)
    )
    assert (proof.threshold, proof.ngram) == (threshold, ngram)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"threshold": 0.95}, "`decontaminate: {threshold: 0.8}`"),
        ({"threshold": None, "ngram": None}, "`decontaminate: {threshold: 0.8, ngram: 13}`"),
        ({"share": 0.5, "ignore_above": 2}, "`decontaminate: {share: 0, ignore_above: 10}`"),
        ({"ignore_above": None}, "when the version is built again"),
    ],
)
def test_the_fix_names_the_settings_that_let_records_pass(settings: Any, says: str) -> None:
    assert says in LeakCheck.of(Decontaminate(**settings), SplitsConfig()).fix


def test_following_the_fix_mends_it() -> None:
    lax = Decontaminate(threshold=None, ngram=None, share=0.9, ignore_above=1)
    assert "{threshold: 0.8, ngram: 13, share: 0, ignore_above: 10}" in LeakCheck.of(lax, SplitsConfig()).fix
    strict = Decontaminate(threshold=0.8, ngram=13, share=0, ignore_above=10)
    assert "settings" not in LeakCheck.of(strict, SplitsConfig()).fix


@pytest.mark.parametrize(
    ("learnt", "asked", "says"),
    [
        ("Where is it?", "Where  is it? ", "the same input"),
        (f"one {LONG} two three", f"four five {LONG}", "13-gram"),
    ],
)
def test_a_whole_set_is_held_against_the_test_set(learnt: str, asked: str, says: str) -> None:
    train = table_of({"prompt": "Something else", "source": "a.jsonl"}, {"prompt": learnt, "source": "a.jsonl"})
    test = table_of({"prompt": asked, "source": "t.jsonl"})
    with pytest.raises(UserError, match=r"a\.jsonl:2 \(train\) and t\.jsonl:1 \(test\)") as error:
        require_no_overlap(train, {"test": test}, "train@v3", None)
    assert says in str(error.value)
    assert str(error.value).startswith("train@v3: 1 record of train give")
    require_no_overlap(train.slice(0, 1), {"test": test}, "train@v3", None)


def test_a_step_without_ngrams_does_not_hide_a_leak(tmp_path: Path) -> None:
    rows = [f'{{"text": "{number * 7919} {LONG} {number * 104729}"}}' for number in range(12)]
    (tmp_path / "f.jsonl").write_text("\n".join(rows), encoding="utf-8")
    steps = [{"decontaminate": {"ngram": None, "threshold": None, "contained": None}}]
    splits = {"test": 0.5, "near_duplicates": None}
    version = made(tmp_path, steps, splits)
    with pytest.raises(UserError, match=r"^s: \d+ records of train give test away.*`decontaminate: \{ngram: 13\}`"):
        training_records(version, "s")


def test_what_is_switched_off_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f'{{"text": "{number * 7919}", "group": "g{number % 3}"}}' for number in range(12)]
    (tmp_path / "f.jsonl").write_text("\n".join(rows), encoding="utf-8")
    version = made(tmp_path, ["exact"], {"test": 0.5, "near_duplicates": None, "group": False})
    with caplog.at_level(logging.WARNING, logger="posttrain"):
        training_records(version, "s")
    (message,) = caplog.messages
    assert message == (
        "s: the check before training does not look for shared groups (`splits.group` is false) "
        "and near duplicates (no threshold is set)"
    )


def made(root: Path, steps: list[Any], splits: dict[str, Any]) -> Version:
    config = {"name": "s", "files": ["f.jsonl"], "steps": steps, "splits": splits, "workspace": root}
    return build({**config, "engine": "inline"})
