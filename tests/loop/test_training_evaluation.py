"""A round's training is evaluated on a share of its training set."""

from collections.abc import Callable
from typing import Any

import pytest

from posttrain.loop.config import load_config
from posttrain.store.errors import UserError
from posttrain.train.curves import read_round_training

pytestmark = pytest.mark.slow


def test_a_round_holds_out_a_share_of_its_training_set(small: Any, begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop()
    evaluate = {"data": 0.25, "every": 1, "metrics": ["label_likelihood"], "patience": 1}
    small.configure(loop.root, rounds=1, train={"evaluate": evaluate, "batch_size": 4})
    loop.run(until="train")
    (run,) = loop.metadata.runs(stage="train", status="done")
    summary = loop.metadata.artifact(run.output).meta
    assert summary["examples"] == 9
    assert 0 <= summary["evaluation"]["label_likelihood/accuracy"] <= 1
    curves = read_round_training(loop.store, run, "round 1")
    assert curves is not None
    assert len(curves.evaluation["loss"]) == len(curves.steps) == summary["steps"]


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        ({"data": "test.csv"}, "train.evaluate.data: a round holds out a share of its training set; write a number"),
        ({"data": 0.1, "metrics": ["exact"]}, "train.evaluate.metrics: there is no scorer `exact`"),
    ],
)
def test_what_a_round_cannot_evaluate_is_refused(small: Any, evaluate: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(small(train={"evaluate": evaluate}))
