"""A curriculum by the champions' scores of the records, and columns of difficulty and weight."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from posttrain.loop.config import load_config
from posttrain.loop.context import RoundContext
from posttrain.loop.difficulty import difficulties
from posttrain.store.errors import UserError
from posttrain.train import stage as training

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]


def curriculum(difficulty: str) -> dict[str, Any]:
    """A training with a curriculum by a score or column."""
    settings = {"name": "fixed", "duration": 0.6, "start": 0.3, "difficulty": difficulty}
    return {"phases": [{"epochs": 1, "curriculum": settings}]}


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """For each training: the difficulty of each record by its input id, and the curriculum."""
    result: list[dict[str, Any]] = []
    train = training.train

    def recording_train(source: Path, records: Any, config: Any, task: Any, **options: Any) -> Any:
        values = options["difficulties"]
        inputs = records["input_id"].to_pylist()
        difficulties = {} if values is None else dict(zip(inputs, values.tolist(), strict=True))
        result.append({"values": difficulties, "curriculum": config.phases[0].curriculum is not None})
        return train(source, records, config, task, **options)

    monkeypatch.setattr(training, "train", recording_train)
    return result


def scores_of(loop: Any, round: int, name: str) -> dict[str, float]:
    """The champion's scores of a round's batch, by input id."""
    detail = loop.metadata.rounds()[round].detail
    pool = parquet.read_table(loop.store.artifacts.path(detail["queried_pool"]) / "records.parquet")
    inputs = dict(zip(pool["id"].to_pylist(), pool["input_id"].to_pylist(), strict=True))
    scores = parquet.read_table(loop.store.artifacts.path(detail["scores"]) / "scores.parquet")
    chosen = set(loop.labelled_inputs(round))
    values = zip(scores["id"].to_pylist(), scores[name].to_pylist(), strict=True)
    return {inputs[id]: value for id, value in values if inputs[id] in chosen}


def test_difficulty_is_the_champions_uncertainty(
    small: Any, begun_loop: Callable[..., Any], copied_loop: Any, trainings: list[dict[str, Any]]
) -> None:
    train = curriculum("margin")
    begun_loop(train=train).run(1, until="train")
    assert trainings[0] == {"values": {}, "curriculum": False}, "no champion scores records before the first training"
    loop = copied_loop
    small.configure(loop.root, train=train)
    loop.run(3, until="train")
    scores = {id: -value for round in (2, 3) for id, value in scores_of(loop, round, "margin").items()}
    assert len(scores) == 24
    assert trainings[1]["curriculum"]
    assert trainings[1]["values"] == {**dict.fromkeys(loop.labelled_inputs(1), -math.inf), **scores}
    rounds = loop.metadata.rounds()
    inputs = loop.metadata.runs(stage="train")[-1].inputs
    assert {role: id for role, id in inputs.items() if role[-1] in "23"} == {
        f"{role} {round}": rounds[round].detail[role] for role in ("scores", "selection") for round in (2, 3)
    }


@pytest.mark.parametrize(("name", "sign"), [("entropy", 1), ("margin", -1), ("confidence", -1)])
def test_for_every_score_difficulty_grows_with_uncertainty(small: Any, copied_loop: Any, name: str, sign: int) -> None:
    small.configure(copied_loop.root, train=curriculum(name))
    context = RoundContext(copied_loop.store, load_config(copied_loop.root), 3, in_round=False)
    records = context.dataset(copied_loop.metadata.rounds()[2].detail["dataset"]).records
    _, values, _ = difficulties(context, records)
    assert values is not None
    result = dict(zip(records["input_id"].to_pylist(), values.tolist(), strict=True))
    scores, entropies = (scores_of(copied_loop, 2, column) for column in (name, "entropy"))
    assert {id: result[id] for id in scores} == {id: sign * value for id, value in scores.items()}
    assert max(scores, key=result.__getitem__) == max(entropies, key=entropies.__getitem__)


def test_lost_scores_count_as_unscored(
    small: Any, copied_loop: Any, open_loop: Open, trainings: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    loop = copied_loop
    small.configure(loop.root, train=curriculum("entropy"))
    scores = loop.store.artifacts.path(loop.metadata.rounds()[2].detail["scores"])
    (scores / "scores.parquet").unlink()
    open_loop(loop.root).run(3, until="train")
    assert "the records that round 2 chose count as unscored" in caplog.text
    scored = {id for id, value in trainings[-1]["values"].items() if math.isfinite(value)}
    assert scored == set(loop.labelled_inputs(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": curriculum("entropie")},
            r"^train\.phases\.N\.curriculum\.difficulty: no score and no column of numbers `entropie`; there is loss, "
            r"entropy, least_confidence, margin, confidence; in the data worth$",
        ),
        (
            {"train": curriculum("perplexity")},
            "`perplexity`; name it in select.scores to have it computed",
        ),
        (
            {"train": curriculum("margin"), "task": {"labels": None}},
            "no score and no column of numbers `margin`",
        ),
        ({"train": {"weight": "value"}}, r"pool\.csv:2: .*it has no number `value` but `None`; .* such as `worth`"),
    ],
)
def test_a_missing_difficulty_is_reported_before_a_model_is_loaded(
    small: Any, open_loop: Open, changes: dict[str, Any], message: str
) -> None:
    root = with_worth(small, 0, **changes)
    loop = open_loop(root)
    with pytest.raises(UserError, match=message) as caught:
        loop.run()
    assert "\n" not in str(caught.value)
    assert [run.stage for run in loop.metadata.runs()] == ["collect pool", "collect test", "collect labelled"]


def test_a_column_with_the_name_of_a_score_is_refused(small: Any, open_loop: Open) -> None:
    root = small(train=curriculum("entropy"))
    rows = [{**row, "entropy": str(number)} for number, row in enumerate(small.rows()[:60])]
    small.write(root / "pool.csv", rows, ["text", "entropy"])
    with pytest.raises(UserError, match="`entropy` is a score of the loop and a column of the data"):
        open_loop(root).run()


def test_a_column_of_the_pool_weights_records(small: Any, open_loop: Open) -> None:
    loop = open_loop(with_worth(small, 30, train={"weight": "worth", "epochs": 1}, rounds=1))
    loop.run(1, until="train")
    model = loop.metadata.runs(stage="train")[-1].output
    meta = loop.store.artifacts.get(model).meta
    assert meta["examples"] + len(meta["weightless"]) == 12
    assert 0 < meta["examples"] < 12


def with_worth(small: Any, zeros: int, **changes: Any) -> Path:
    """A workspace whose pool has a column of weights; the first ``zeros`` of them are 0."""
    root: Path = small(**changes)
    rows = [{**row, "worth": "0" if number < zeros else "0.5"} for number, row in enumerate(small.rows()[:60])]
    small.write(root / "pool.csv", rows, ["text", "worth"])
    return root
