"""The random baseline beside the loop: shared work, separate state, and the comparison."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from posttrain.evaluate.paired_interval import Interval
from posttrain.inspect.random_baseline import Comparison, check_random_loop, compare_with_random, run_random_loop
from posttrain.loop.config import load_config
from posttrain.loop.history import CandidateResult, candidate_results, champion_results
from posttrain.select.selectors.registry import select as select_rows
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]


@pytest.fixture
def first_loop(small: Any, begun_loop: Callable[..., Any]) -> Any:
    """A loop after round 1, whose hook notes each round that deploys."""
    loop = begun_loop(rounds=1, deploy={"command": "touch deployed-{round}"})
    loop.run()
    return loop


def test_it_samples_at_random_does_not_change_the_loop_and_continues_with_it(small: Any, first_loop: Any) -> None:
    loop, root = first_loop, first_loop.root
    before = [loop.metadata.rounds(), loop.metadata.deployments(), loop.metadata.names(), loop.champion]
    hooks = sorted(path.name for path in root.glob("deployed-*"))
    result = run_random_loop(loop.store, load_config(root))
    assert [loop.metadata.rounds(), loop.metadata.deployments(), loop.metadata.names(), loop.champion] == before
    assert sorted(path.name for path in root.glob("deployed-*")) == hooks
    assert result is not None
    assert (
        [candidate.labels for candidate in result.ours] == [candidate.labels for candidate in result.random] == [0, 12]
    )
    assert result.ours[0] == result.random[0], "both start with the same model, measured once"
    baseline = loop.store.for_arm("random")
    batch = parquet.read_table(
        baseline.artifacts.path(baseline.metadata.rounds()[1].detail["selection"]) / "batch.parquet"
    )
    assert set(batch["reason"].to_pylist()) <= {"strategy", "cold_start"}
    stages = [run.stage for run in baseline.metadata.runs()]
    assert "fetch" not in stages
    assert stages.count("train") == 1
    assert baseline.champion_path.name == "champion-random"
    assert loop.store.champion_path.name == "champion"
    assert compare_with_random(loop.store, load_config(root)) == result
    loop.run(2)
    before_it = compare_with_random(loop.store, load_config(root))
    assert before_it is not None
    assert len(before_it.ours) == len(before_it.random) == 2
    continued = run_random_loop(loop.store, load_config(root))
    assert continued is not None
    assert len(continued.random) == 3
    assert continued.random[:2] == before_it.random


def test_without_a_round_there_is_nothing_to_compare(begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop()
    assert run_random_loop(loop.store, load_config(loop.root)) is None


def test_label_counts_include_files_and_discarded_labels(
    small: Any, evaluated_loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.loop.stages.deploy._discards_labels", lambda decision: True)
    refuse = {"deploy": ["accuracy > 2"]}
    loop = evaluated_loop(label={"per_round": 12}, gate=refuse)
    loop.run(3)
    small.write(loop.root / "more.csv", small.rows()[80:90])
    small.configure(
        loop.root, label={"per_round": 8}, gate=refuse, train={"epochs": 1}, data={"labelled": ["more.csv"]}
    )
    loop.run(4)
    assert [item.labels for item in candidate_results(loop.store)] == [0, 12, 24, 36, 24 + 10 + 8], (
        "a candidate does not train on discarded labels"
    )
    assert [item.labels for item in champion_results(loop.store)] == [0, 12, 24, 36, 36 + 10 + 8], (
        "the cost includes discarded labels"
    )


def test_the_baseline_needs_an_oracle_and_a_known_name(small: Any) -> None:
    config = load_config(small(label={"annotator": "people", "file": None}))
    with pytest.raises(UserError, match="people would have to write them"):
        check_random_loop(config, "random")
    with pytest.raises(UserError, match="no baseline `luck`"):
        check_random_loop(config, "luck")


def _results(*values: float) -> tuple[CandidateResult, ...]:
    return tuple(CandidateResult(number, 50 * number, value, "e") for number, value in enumerate(values))


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.01, 0.2, "is better"), (-0.2, -0.01, "is worse"), (-0.1, 0.2, "makes no clear difference")],
)
def test_the_conclusion_depends_on_the_interval(low: float, high: float, verdict: str) -> None:
    gain = Interval((low + high) / 2, low, high, 200, 40)
    results = _results(0.2, 0.6, 0.8), _results(0.2, 0.4, 0.6)
    conclusion = Comparison("accuracy", *results, gain, 0.95, (0.79, 0.61)).conclusion
    assert verdict in conclusion
    assert "accuracy 0.790 with 100 labels chosen, 0.610 with 100 drawn at random" in conclusion
    assert "The random baseline's accuracy took 50 chosen labels, 50% of its own." in conclusion


def test_the_conclusion_does_not_count_the_initial_labels() -> None:
    results = [
        tuple(replace(candidate, labels=candidate.labels + 500) for candidate in _results(*values))
        for values in _ACCURACIES
    ]
    conclusion = Comparison(
        "accuracy", results[0], results[1], Interval(0.2, 0.1, 0.3, 200, 40), 0.95, (0.8, 0.6)
    ).conclusion
    assert "with 100 labels chosen" in conclusion
    assert "The random baseline's accuracy took 50 chosen labels, 50% of its own." in conclusion


_ACCURACIES = ((0.2, 0.6, 0.8), (0.2, 0.4, 0.6))


def test_it_trains_with_the_same_curriculum_and_ignores_near_duplicates_and_stopping(
    small: Any, copied_loop: Any
) -> None:
    """With a curriculum by the champion's scores, the baseline scores records too but still samples at random."""
    loop, root = copied_loop, copied_loop.root
    curriculum = {"name": "fixed", "difficulty": "entropy"}
    select = {"near_duplicate": 0.01, "stop": {"action": "stop", "gain": 1.0}}
    small.configure(root, train={"phases": [{"epochs": 1, "curriculum": curriculum}]}, select=select)
    result = run_random_loop(loop.store, load_config(root))
    assert result is not None
    assert len(result.random) == 3, "it does not stop before the loop"
    baseline = loop.store.for_arm("random")
    for entry in baseline.metadata.rounds()[1:]:
        scores = parquet.read_table(loop.store.artifacts.path(entry.detail["scores"]) / "scores.parquet")
        assert np.isfinite(scores["entropy"].to_numpy()).all() or entry.number == 1
        batch = parquet.read_table(loop.store.artifacts.path(entry.detail["selection"]) / "batch.parquet")
        assert entry.number == 1 or set(batch["reason"].to_pylist()) == {"strategy"}
        seed = loop.store.metadata.producers(entry.detail["selection"])[-1].seed
        ids = sorted(scores["id"].to_pylist())
        expected_rows = select_rows("random", {"loss": np.zeros(len(ids))}, 12, seed)
        assert batch["id"].to_pylist() == [ids[row] for row in expected_rows]
    train_runs = [run for run in baseline.metadata.runs(stage="train", status="done") if run.round == 2]
    assert any(role.startswith("scores") for role in train_runs[-1].inputs)


def test_the_comparison_uses_all_test_records_only_after_the_same_round(
    small: Any, begun_loop: Callable[..., Any]
) -> None:
    changes: dict[str, Any] = {
        "label": {"per_round": 8},
        "train": {"epochs": 1},
        "evaluate": {"suites": {"test": {"sample": 8}}, "latency": {"prompts": 0}},
    }
    loop = begun_loop(rounds=1, **changes)
    root = loop.root
    loop.run()
    first = run_random_loop(loop.store, load_config(root))
    assert first is not None
    assert first.gain.n == 20, "both were measured on all test records"
    small.configure(root, rounds=2, **changes)
    loop.run()
    later = compare_with_random(loop.store, load_config(root))
    assert later is not None
    assert len(later.ours) == 2
    assert later.gain.n == 8, "the baseline lacks the round of the loop's last model"
    assert later.final == (later.ours[-1].value, later.random[-1].value)


def test_after_a_rollback_the_previous_model_counts(small: Any, evaluated_loop: Callable[..., Any]) -> None:
    loop = evaluated_loop()
    rule = f"macro_f1 == {loop.metadata.rounds()[2].detail['metrics']['macro_f1']!r}"
    small.configure(loop.root, train={"epochs": 1}, gate={"deploy": ["accuracy > 2"], "rollback": [rule]})
    loop.run(3)
    base, first, second, last = loop.metadata.rounds()
    assert last.decision["action"] == "rollback"
    assert loop.champion == first.candidate
    assert [item.evaluation for item in champion_results(loop.store)] == [
        entry.detail["evaluation"] for entry in (base, first, second, first)
    ]
