"""Rules that change the config for the next rounds."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.evaluate.metrics import recall_weights
from posttrain.loop.adjust import Change, adjust, with_adjustments
from posttrain.loop.config import Config, load_config
from posttrain.store.errors import UserError


def config(rules: list[dict[str, Any]], **sections: Any) -> Config:
    return Config.read({"model": "tiny", "data": {"pool": ["p"]}, "adjust": rules, **sections}, "posttrain.yaml")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"plateau >= 2": "faster"}], "names no key and its change"),
        (
            [{"plateau >= 2": "train.learning_rat * 0.5"}],
            "no key `train.learning_rat`; did you mean `train.learning_rate`",
        ),
        ([{"plateau >= 2": "gate.deploy = none"}], "is not for rules to change"),
        ([{"plateau >= 2": "train.learning_rate * fast"}], "a number follows"),
        ([{"plateau >= 2": "train.learning_rate / 0"}], "divides by 0"),
        ([{"plateau >= 2": "select.strategy * 2"}], "no number"),
        ([{"plateau >= 2": "select.strategy = margn"}], "cannot be 'margn'"),
        ([{"plateau >= 2": "train.learning_rate * -1"}], "cannot be"),
        ([{"plateau >= 2": []}], "changes no key"),
        ([{"loss_variants > 0.3": "train.epochs + 1"}], "no value `loss_variants`; did you mean `loss_variance`"),
        ([{"loss_variance >": "train.epochs + 1"}], "something is missing at its end"),
        (["loss_variance > 0.3"], "`loss_variance > 0.3` names no key to change"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_with_the_config(small: Any, rules: list[Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(small(adjust=rules))
    assert message in str(caught.value)
    assert "adjust" in str(caught.value)


def test_changes_are_arithmetic_and_counts_stay_counts() -> None:
    assert Change.parse("train.learning_rate*0.5").apply(2e-4) == 1e-4
    assert Change.parse("train.epochs / 2").apply(5) == 2
    assert Change.parse("select.explore + 0.1").apply(0.1) == pytest.approx(0.2)
    assert Change.parse("select.strategy = [margin, random]").apply("auto") == ["margin", "random"]


def test_rules_hold_by_their_values_and_apply_in_order() -> None:
    before = config(
        [{"plateau >= 2": ["train.epochs + 2", "train.epochs * 2"]}, {"loss_fall > 0.1": "train.epochs + 1"}]
    )
    records = adjust(before, before, {"plateau": 2.0})
    assert [(record.before, record.after) for record in records] == [(6, 8), (8, 16)]
    assert records[0].sentence == "train.epochs 6 → 8: plateau >= 2 (plateau = 2)"
    assert adjust(before, before, {"plateau": 1.0}) == []


def test_a_value_that_walks_out_of_its_range_stays_and_says_so() -> None:
    file = config([{"plateau >= 1": "train.objective.label_smoothing + 0.4"}])
    now, records = file, []
    for _ in range(4):
        adjustments = adjust(now, file, {"plateau": 1.0})
        records += [record.as_dict() for record in adjustments]
        now = with_adjustments(file, records)
    assert [record["after"] for record in records] == pytest.approx([0.4, 0.8, 0.8, 0.8])
    assert [record["problem"] is None for record in records] == [True, True, False, False]
    assert "less than 1" in records[-1]["problem"]


def test_the_user_has_the_last_word() -> None:
    rules = [{"plateau >= 1": "train.epochs + 2"}]
    file = config(rules)
    records = [record.as_dict() for record in adjust(file, file, {"plateau": 1.0})]
    assert with_adjustments(file, records).train.epochs == 8
    assert with_adjustments(config(rules, train={"epochs": 3}), records).train.epochs == 3
    assert with_adjustments(config([]), records).train.epochs == 6


def test_recall_weights_are_those_of_shrunk_recalls() -> None:
    rows = [{"label": "a", "support": 8, "correct": 8}, {"label": "b", "support": 2, "correct": 0}]
    weights = recall_weights(rows, 2.0)
    assert weights == {"a": pytest.approx(1 + 2 * (1 - 12 / 13)), "b": pytest.approx(1 + 2 * (1 - 4 / 7))}
    assert recall_weights(rows, 0.0) == {"a": 1.0, "b": 1.0}
    assert recall_weights([], 1.0) == {}


@pytest.mark.slow
def test_a_round_changes_the_next_ones_and_a_resumed_loop_ends_the_same(
    begun_loop: Callable[..., Any], open_loop: Callable[[Path], Any], tmp_path: Path
) -> None:
    rules = [
        {"round == 1": ["train.learning_rate * 0.5", "train.epochs + 6", "train.objective.focal = 2"]},
        {"loss_variance >= 0 and loss_fall < 2 and last_loss > 0": "evaluate.error_weight = 1"},
        {"plateau >= 0 and gain.accuracy.high > -2 and champion.accuracy >= 0": "label.per_round + 1"},
    ]
    changes: dict[str, Any] = {"rounds": 3, "adjust": rules, "label": {"per_round": 8}}
    in_pieces = begun_loop("in pieces", **changes)
    in_pieces.run(1)
    root = Path(shutil.copytree(in_pieces.root, tmp_path / "at once", symlinks=True))
    in_pieces.run(2)
    open_loop(in_pieces.root).run(3, until="train")
    loop = open_loop(root)
    loop.run()
    trainings = [item.metadata.runs(stage="train", status="done") for item in (loop, in_pieces)]
    assert [run.output for run in trainings[0]] == [run.output for run in trainings[1]]
    trained = [run.config["train"] for run in trainings[0]]
    assert [train["learning_rate"] for train in trained] == [4e-3, 2e-3, 2e-3]
    assert [train["epochs"] for train in trained] == [2, 8, 8]
    assert [train["objective"]["focal"] for train in trained] == [0.0, 2.0, 2.0]
    # Round 2 was the first with enough steps for its losses to have a variance.
    steering = [run.config.get("error_weight") for run in loop.metadata.runs(stage="train", status="done")]
    assert steering == [None, None, 1.0]
    assert [row.detail.get("labels_new") for row in loop.metadata.rounds()] == [None, 8, 9, 10]
    sentences = loop.status["rounds"][1]["adjustments"]
    assert sentences[0] == "train.learning_rate 0.004 → 0.002: round == 1 (round = 1)"
    assert yaml.safe_load((root / "posttrain.yaml").read_text())["train"]["epochs"] == 2
    assert load_config(root).train.epochs == 2
