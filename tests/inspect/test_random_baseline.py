"""The random loop beside the loop: what it shares, what it keeps for itself, and what it says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from posttrain.evaluate.bootstrap import Interval
from posttrain.inspect.random_baseline import Comparison, check_baseline, comparison, run_baseline
from posttrain.loop.config import load_config
from posttrain.loop.history import CandidateResult, candidate_results, champion_results
from posttrain.select.selectors.registry import select as select_rows
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]


def test_it_draws_at_random_and_leaves_the_loop_alone(open_loop: Callable[[Path], Any], small: Any) -> None:
    root = small(rounds=2, label={"per_round": 12}, deploy={"command": "touch deployed-{round}"})
    loop = open_loop(root)
    loop.run()
    before = [loop.metadata.rounds(), loop.metadata.deployments(), loop.metadata.names(), loop.champion]
    hooks = sorted(path.name for path in root.glob("deployed-*"))
    result = run_baseline(loop.store, load_config(root))
    assert [loop.metadata.rounds(), loop.metadata.deployments(), loop.metadata.names(), loop.champion] == before
    assert sorted(path.name for path in root.glob("deployed-*")) == hooks
    assert result is not None
    assert [item.labels for item in result.ours] == [item.labels for item in result.random] == [0, 12, 24]
    assert result.ours[0] == result.random[0], "both begin with the same model, measured once"
    beside = loop.store.for_arm("random")
    for entry in beside.metadata.rounds()[1:]:
        batch = parquet.read_table(beside.artifacts.path(entry.detail["selection"]) / "batch.parquet")
        assert set(batch["reason"].to_pylist()) <= {"strategy", "cold_start"}
    stages = [run.stage for run in beside.metadata.runs()]
    assert "fetch" not in stages
    assert stages.count("train") == 2
    assert beside.champion_path.name == "champion-random"
    assert loop.store.champion_path.name == "champion"
    assert comparison(loop.store, load_config(root)) == result


def test_it_continues_with_the_loop(open_loop: Callable[[Path], Any], small: Any) -> None:
    root = small(rounds=2, label={"per_round": 8})
    loop, config = open_loop(root), load_config(root)
    loop.run(0)
    assert run_baseline(loop.store, config) is None
    loop.run(1)
    run_baseline(loop.store, config)
    loop.run(2)
    known = comparison(loop.store, config)
    assert known is not None
    assert len(known.ours) == len(known.random) == 2
    after = run_baseline(loop.store, config)
    assert after is not None
    assert len(after.random) == 3
    assert after.random[:2] == known.random


def test_it_is_random_whatever_the_loop_does_with_near_duplicates_and_stopping(small: Any, open_loop: Open) -> None:
    select = {"near_duplicate": 0.01, "stop": {"action": "advise", "gain": 1.0}}
    root = small(rounds=2, label={"per_round": 8}, select=select)
    loop = open_loop(root)
    loop.run()
    small.configure(root, rounds=2, label={"per_round": 8}, select={**select, "stop": {"action": "stop", "gain": 1.0}})
    result = run_baseline(loop.store, load_config(root))
    assert result is not None
    assert len(result.random) == 3, "it does not stop before the loop"
    first = loop.store.for_arm("random").metadata.rounds()[1].detail
    scores = parquet.read_table(loop.store.artifacts.path(first["scores"]) / "scores.parquet", columns=["id"])
    batch = parquet.read_table(loop.store.artifacts.path(first["selection"]) / "batch.parquet")
    ids = sorted(scores["id"].to_pylist())
    seed = loop.store.metadata.producers(first["selection"])[-1].seed
    drawn = select_rows("random", {"loss": np.zeros(len(ids))}, 8, seed)
    assert batch["id"].to_pylist() == [ids[row] for row in drawn]


def test_labels_count_those_of_files_and_those_that_are_set_aside(small: Any, open_loop: Open) -> None:
    root = small(rounds=2, label={"per_round": 8, "when_refused": "set_aside"}, gate={"deploy": ["accuracy > 2"]})
    loop = open_loop(root)
    loop.run()
    assert [item.labels for item in candidate_results(loop.store)] == [0, 8, 8], (
        "a candidate learns without what is set aside"
    )
    assert [item.labels for item in champion_results(loop.store)] == [0, 8, 16], "which was given all the same"
    small.write(root / "more.csv", small.rows()[80:90])
    small.configure(root, rounds=3, label={"per_round": 8}, data={"labelled": ["more.csv"]})
    loop.run()
    assert [item.labels for item in champion_results(loop.store)] == [0, 8, 16, 34]


def test_people_do_not_label_twice(small: Any) -> None:
    config = load_config(small(label={"annotator": "file", "file": None}))
    with pytest.raises(UserError, match="people would give them"):
        check_baseline(config, "random")
    with pytest.raises(UserError, match="no baseline `luck`"):
        check_baseline(config, "luck")


def _standings(*values: float) -> tuple[CandidateResult, ...]:
    return tuple(CandidateResult(number, 50 * number, value, "e") for number, value in enumerate(values))


@pytest.mark.parametrize(
    ("low", "high", "words"), [(0.01, 0.2, "is better"), (-0.2, -0.01, "is worse"), (-0.1, 0.2, "cannot be told")]
)
def test_the_conclusion_goes_by_the_interval(low: float, high: float, words: str) -> None:
    gain = Interval((low + high) / 2, low, high, 200)
    sides = _standings(0.2, 0.6, 0.8), _standings(0.2, 0.4, 0.6)
    result = Comparison("accuracy", *sides, gain, 0.95, (0.79, 0.61)).conclusion
    assert words in result
    assert "accuracy 0.790 with 100 labels chosen, 0.610 with 100 drawn at random" in result
    assert "50 chosen labels, 50% of random's" in result


def test_the_conclusion_leaves_out_labels_that_both_began_with() -> None:
    given = [tuple(replace(item, labels=item.labels + 500) for item in _standings(*values)) for values in _TWO]
    result = Comparison("accuracy", given[0], given[1], Interval(0.2, 0.1, 0.3, 200), 0.95, (0.8, 0.6)).conclusion
    assert "with 100 labels chosen" in result
    assert "50 chosen labels, 50% of random's" in result


_TWO = ((0.2, 0.6, 0.8), (0.2, 0.4, 0.6))


def test_the_random_loop_trains_in_the_same_order(small: Any, open_loop: Open) -> None:
    """A curriculum by what the champion said: it is asked in the random loop too, which draws all the same."""
    curriculum = {"name": "fixed", "difficulty": "entropy"}
    root = small(rounds=2, label={"per_round": 12}, train={"epochs": 2, "curriculum": curriculum})
    loop = open_loop(root)
    loop.run()
    assert run_baseline(loop.store, load_config(root)) is not None
    beside = loop.store.for_arm("random")
    last = beside.metadata.rounds()[2].detail
    scores = parquet.read_table(loop.store.artifacts.path(last["scores"]) / "scores.parquet")
    assert np.isfinite(scores["entropy"].to_numpy()).all()
    batch = parquet.read_table(loop.store.artifacts.path(last["selection"]) / "batch.parquet")
    assert set(batch["reason"].to_pylist()) == {"strategy"}
    seed = loop.store.metadata.producers(last["selection"])[-1].seed
    ids = sorted(scores["id"].to_pylist())
    drawn = select_rows("random", {"loss": np.zeros(len(ids))}, 12, seed)
    assert batch["id"].to_pylist() == [ids[row] for row in drawn]
    trained = [run for run in beside.metadata.runs(stage="train", status="done") if run.round == 2]
    assert any(role.startswith("scores") for role in trained[-1].inputs)


def test_all_test_records_count_only_where_both_loops_are_equally_far(small: Any, open_loop: Open) -> None:
    suites = {"test": {"sample": 8}}
    root = small(rounds=1, label={"per_round": 8}, evaluate={"suites": suites, "latency": {"prompts": 0}})
    loop = open_loop(root)
    loop.run()
    first = run_baseline(loop.store, load_config(root))
    assert first is not None
    assert first.gain.n == 20, "both have been measured on all"
    small.configure(root, rounds=2, label={"per_round": 8}, evaluate={"suites": suites, "latency": {"prompts": 0}})
    loop.run()
    later = comparison(loop.store, load_config(root))
    assert later is not None
    assert len(later.ours) == 2
    assert later.gain.n == 8, "the loop's last model is of a round that the random one has not"
    assert later.reached == (later.ours[-1].value, later.random[-1].value)


def test_after_a_roll_back_the_model_before_stands(small: Any, open_loop: Open) -> None:
    root = small(rounds=1, label={"per_round": 8})
    loop = open_loop(root)
    loop.run()
    small.configure(
        root,
        rounds=2,
        label={"per_round": 8},
        gate={"deploy": ["accuracy > 2"], "rollback": ["accuracy >= 0"]},
    )
    loop.run()
    base, trained, last = loop.metadata.rounds()
    assert last.decision["action"] == "rollback"
    assert loop.champion == base.candidate
    ours = champion_results(loop.store)
    assert [item.evaluation for item in ours] == [
        base.detail["evaluation"],
        trained.detail["evaluation"],
        base.detail["evaluation"],
    ]
