"""Rounds that end in a refusal or a rollback, and manual decisions in between."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.stages.evaluate import measure_latencies

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]
# Enough for the tiny model to learn the four labels by heart.
LEARNS: dict[str, Any] = {"epochs": 20, "learning_rate": 4.0e-3, "precision": "float32"}


def removes(entry: Any) -> dict[str, list[str]]:
    """A gate that deploys nothing, and removes the champion of a round by a rule that holds for no other."""
    rule = f"macro_f1 == {entry.detail['metrics']['macro_f1']!r}"
    return {"deploy": ["accuracy > 2"], "rollback": [rule], "collect_more": ["accuracy > 2"]}


@pytest.fixture
def wrong_second_round(small: Any) -> Callable[..., Path]:
    """A workspace whose second round has only wrong labels."""

    def create(name: str = "workspace", **changes: Any) -> Path:
        label = {"per_round": 20, "error_rate": {2: 1.0}} | changes.pop("label", {})
        gate = {"deploy": ["accuracy > champion.accuracy"]}
        root: Path = small(name, rounds=3, label=label, train=LEARNS, **({"gate": gate} | changes))
        small.write(root / "test.csv", small.rows()[60:160])  # enough for a significantly lower accuracy
        return root

    return create


def test_a_bad_round_is_refused_and_its_labels_are_discarded(
    wrong_second_round: Callable[..., Path], open_loop: Open, small: Any
) -> None:
    loop = open_loop(wrong_second_round())
    loop.run(2)
    loop.run(until="dataset")
    good, bad, last = loop.metadata.rounds()[1:]
    assert good.detail["metrics"]["accuracy"] >= 0.9
    assert bad.detail["metrics"]["accuracy"] < good.detail["metrics"]["accuracy"]
    assert bad.decision["action"] == "refuse"
    (interval,) = bad.decision["intervals"].values()
    assert interval["high"] < 0
    assert bad.detail["set_aside"]
    assert bad.detail["carry"] == good.detail["dataset"]
    first, wrong, third = (loop.labelled_inputs(round) for round in (1, 2, 3))
    assert set(loop.trained_on(2)) == {*first, *wrong}
    assert set(loop.trained_on(3)) == {*first, *third}
    assert last.detail["labels"] == 40
    # Records whose labels were discarded can be chosen again: 40 of 60 are free, 20 of them with a wrong label.
    assert loop.metadata.artifact(last.detail["scores"]).meta["pool"] == 40
    assert set(wrong) & set(third)
    truth = {row["text"]: row["label"] for row in small.rows()}
    records = {record["input_id"]: record for record in _records(loop, 3)}
    assert all(truth[record["prompt"][0]["content"]] == record["completion"] for record in records.values())


def _records(loop: Any, round: int) -> list[dict[str, Any]]:
    import pyarrow.parquet as parquet

    dataset = loop.metadata.rounds()[round].detail["dataset"]
    rows: list[dict[str, Any]] = parquet.read_table(loop.store.artifacts.path(dataset) / "records.parquet").to_pylist()
    return rows


@pytest.mark.parametrize(("policy", "discarded"), [("keep", False), ("set_aside", True)])
def test_the_config_decides_about_refused_labels(small: Any, copied_loop: Any, policy: str, discarded: bool) -> None:
    loop = copied_loop
    small.configure(loop.root, gate={"deploy": ["accuracy > 2"]}, label={"when_refused": policy})
    loop.run(3)
    loop.run(4, until="dataset")
    _, champion, refused, last = loop.metadata.rounds()[1:]
    assert refused.decision["action"] == "refuse"
    assert refused.detail["set_aside"] is discarded
    assert last.detail["labels"] == (36 if discarded else 48)
    assert loop.champion == champion.candidate


def test_the_gate_rolls_back(small: Any, copied_loop: Any) -> None:
    loop = copied_loop
    base, first, second = loop.metadata.rounds()
    assert loop.champion == second.candidate
    small.configure(loop.root, train={"epochs": 1}, gate=removes(second))
    loop.run(3)
    third = loop.metadata.rounds()[3]
    assert third.decision["action"] == "rollback"
    assert third.decision["collect_more"]
    assert loop.champion == first.candidate
    last = loop.metadata.deployments()[-1]
    assert (last.action, last.round, last.model_id) == ("rollback", 3, first.candidate)
    assert removes(second)["rollback"][0] in last.reason
    small.configure(loop.root, train={"epochs": 1}, gate=removes(first))
    loop.run(4)
    small.configure(loop.root, train={"epochs": 1}, gate=removes(base))
    loop.run(5)
    assert [entry.decision["action"] for entry in loop.metadata.rounds()[4:]] == ["rollback", "refuse"]
    assert loop.champion == base.candidate


def test_a_kill_during_a_rollback_rolls_back_once(
    small: Any, copied_loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = copied_loop
    small.configure(loop.root, gate=removes(loop.metadata.rounds()[2]))
    rollback = ModelRegistry.rollback

    def rollback_then_die(self: ModelRegistry, *arguments: Any, **options: Any) -> Any:
        rollback(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "rollback", rollback_then_die)
        with pytest.raises(KeyboardInterrupt):
            loop.run(3)
    loop.run(3)
    assert [entry.action for entry in loop.metadata.deployments()] == ["baseline", "promote", "promote", "rollback"]
    assert loop.metadata.rounds()[3].decision["action"] == "rollback"
    assert loop.champion == loop.metadata.rounds()[1].candidate


def test_the_candidate_is_compared_with_the_champion_that_the_user_deployed_meanwhile(
    small: Any, copied_loop: Any
) -> None:
    loop = copied_loop
    small.configure(loop.root, evaluate={"latency": {"prompts": 2, "repeats": 1}})
    loop.run(3, until="label")
    base, first, second = (entry.candidate for entry in loop.metadata.rounds()[:3])
    assert loop.metadata.rounds()[3].champion_before == second
    stages_before = loop.stages()
    ModelRegistry(loop.store).rollback("found bad in service")
    loop.run(3)
    third = loop.metadata.rounds()[3]
    (latency_inputs,) = [run.inputs for run in loop.metadata.runs(stage="latency") if run.round == 3]
    assert latency_inputs["champion"] == first
    assert third.detail["champion_evaluation"] == loop.metadata.rounds()[1].detail["evaluation"]
    assert "3 label" not in loop.stages(after=len(stages_before)), "labels are not requested twice"
    assert base != first != second


def test_a_rollback_during_the_comparison_counts(small: Any, copied_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = copied_loop
    small.configure(loop.root, evaluate={"latency": {"prompts": 2, "repeats": 1}})
    first, second = (entry.candidate for entry in loop.metadata.rounds()[1:])
    opponents = []

    def measure_after_rollback(context: Any, candidate: str, champion: str, test: str) -> Any:
        opponents.append(champion)
        if len(opponents) == 1:
            ModelRegistry(loop.store).rollback("found bad in service")
        return measure_latencies(context, candidate, champion, test)

    monkeypatch.setattr("posttrain.loop.stages.evaluate.measure_latencies", measure_after_rollback)
    loop.run(3)
    assert opponents == [second, first]
    assert loop.metadata.rounds()[3].detail["champion_evaluation"] == loop.metadata.rounds()[1].detail["evaluation"]


def test_a_candidate_rolled_back_before_the_end_of_its_round_is_not_deployed_again(
    small: Any, open_loop: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = open_loop(small(rounds=1))
    promote = ModelRegistry.promote

    def promote_then_die(self: ModelRegistry, *arguments: Any, **options: Any) -> Any:
        promote(self, *arguments, **options)
        if options["round"] == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "promote", promote_then_die)
        with pytest.raises(KeyboardInterrupt):
            loop.run()
    ModelRegistry(loop.store).rollback("found bad in service")
    loop.run()
    assert [entry.action for entry in loop.metadata.deployments()] == ["baseline", "promote", "rollback"]
    assert loop.champion == loop.metadata.rounds()[0].candidate


def test_the_loop_ends_when_no_collect_more_rule_holds(small: Any, copied_loop: Any) -> None:
    loop = copied_loop
    small.configure(loop.root, rounds=5, gate={"deploy": ["accuracy >= 0"], "collect_more": ["accuracy < 0"]})
    for _ in range(2):
        assert loop.run() is None
        assert len(loop.metadata.rounds()) == 4
    # With a higher target the loop resumes.
    small.configure(loop.root, rounds=5, gate={"deploy": ["accuracy >= 0"], "collect_more": ["accuracy < 2"]})
    loop.run(until="score")
    assert len(loop.metadata.rounds()) == 5


def test_a_failed_hook_runs_again_with_the_next_run(small: Any, open_loop: Open) -> None:
    root = small(rounds=1, deploy={"command": "sh hook.sh"})
    (root / "hook.sh").write_text('echo "$POSTTRAIN_ACTION" >> actions; test -e works\n')
    loop = open_loop(root)
    loop.run()
    assert [entry.hook for entry in loop.metadata.deployments()] == ["failed", "failed"]
    (root / "works").touch()
    loop.run()
    assert [entry.hook for entry in loop.metadata.deployments()] == ["failed", "done"]
    loop.run()
    assert (root / "actions").read_text().split() == ["baseline", "promote", "promote"]
