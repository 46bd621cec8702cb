"""Rounds that end in a refusal or a rollback, and manual decisions in between.

A rollback that the gate requests goes to the newest earlier champion that breaks no rule of ``gate.rollback``.
"""

import logging
import shutil
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
    assert bad.detail["discards_labels"]
    assert bad.detail["next_parent"] == good.detail["dataset"]
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


def rule_for(*rounds: Any) -> str:
    """A rule that holds for the models of these rounds and for no other."""
    return " or ".join(f"macro_f1 == {entry.detail['metrics']['macro_f1']!r}" for entry in rounds)


def removes(*rounds: Any) -> dict[str, list[str]]:
    """A gate that deploys nothing, and removes the champions of these rounds."""
    return {"deploy": ["accuracy > 2"], "rollback": [rule_for(*rounds)], "collect_more": ["accuracy > 2"]}


def test_the_gate_rolls_back_once_even_after_a_kill(
    small: Any, evaluated_loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = evaluated_loop()
    base, first, second = loop.metadata.rounds()[:3]
    assert loop.champion == second.candidate
    small.configure(loop.root, train={"epochs": 1}, gate=removes(second))
    rollback = ModelRegistry.rollback

    def rollback_then_die(self: ModelRegistry, *arguments: Any, **options: Any) -> Any:
        rollback(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "rollback", rollback_then_die)
        with pytest.raises(KeyboardInterrupt):
            loop.run(3)
    loop.run(3)
    third = loop.metadata.rounds()[3]
    assert third.decision["action"] == "rollback"
    assert third.decision["collect_more"]
    assert loop.champion == first.candidate
    assert [entry.action for entry in loop.metadata.deployments()] == ["baseline", "promote", "promote", "rollback"]
    last = loop.metadata.deployments()[-1]
    assert (last.action, last.round, last.model_id) == ("rollback", 3, first.candidate)
    assert rule_for(second) in last.reason
    # No champion is earlier than the base model.
    ModelRegistry(loop.store).rollback("found bad in service", to=base.candidate)
    small.configure(loop.root, train={"epochs": 1}, gate=removes(base))
    loop.run(4)
    assert loop.metadata.rounds()[4].decision["action"] == "refuse"
    assert loop.champion == base.candidate


def test_a_rollback_does_not_stop_at_a_model_that_breaks_the_same_rule(
    small: Any, evaluated_loop: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("posttrain"), "propagate", True)
    loop = evaluated_loop()
    base, first, second = loop.metadata.rounds()[:3]
    small.configure(loop.root, train={"epochs": 1}, gate=removes(first, second))
    with caplog.at_level(logging.INFO, "posttrain"):
        loop.run(3)
    assert loop.metadata.rounds()[3].decision["action"] == "rollback"
    assert loop.champion == base.candidate
    assert f"round 1 cannot return: {rule_for(first, second)} (macro_f1 = " in caplog.text


def test_a_rollback_steps_over_a_damaged_model(small: Any, evaluated_loop: Callable[..., Any], open_loop: Open) -> None:
    loop = evaluated_loop()
    base, first, second = loop.metadata.rounds()[:3]
    (weights,) = loop.store.artifacts.path(first.candidate).glob("*.safetensors")
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1])
    small.configure(loop.root, train={"epochs": 1}, gate=removes(second))
    open_loop(loop.root).run(3)  # a process verifies an artifact only once
    assert loop.champion == base.candidate


def test_the_gate_says_that_no_earlier_champion_passes(
    evaluated_loop: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("posttrain"), "propagate", True)
    loop = evaluated_loop(gate={"deploy": ["accuracy > 2"], "rollback": ["accuracy < 2"]})
    champion = loop.champion
    with caplog.at_level(logging.INFO, "posttrain"):
        loop.run(3)
    assert loop.metadata.rounds()[3].decision["action"] == "refuse"
    assert loop.champion == champion
    assert "the gate requests a rollback, and no earlier champion passes gate.rollback" in caplog.text


def test_the_candidate_is_compared_with_the_champion_that_the_user_deployed_meanwhile(
    small: Any, copied_loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rolled back by hand while the round waits, and again while the candidate is compared."""
    loop = copied_loop
    small.configure(loop.root, evaluate={"latency": {"prompts": 2, "repeats": 1}})
    loop.run(3, until="label")
    base, first, second = (entry.candidate for entry in loop.metadata.rounds()[:3])
    assert base != first != second
    assert loop.metadata.rounds()[3].champion_before == second
    stages_before = loop.stages()
    ModelRegistry(loop.store).rollback("found bad in service")
    opponents = []

    def measure_after_rollback(context: Any, candidate: str, champion: str, test: str) -> Any:
        opponents.append(champion)
        if len(opponents) == 1:
            ModelRegistry(loop.store).rollback("found bad in service", to=base)
        return measure_latencies(context, candidate, champion, test)

    monkeypatch.setattr("posttrain.loop.stages.evaluate.measure_latencies", measure_after_rollback)
    loop.run(3)
    assert opponents == [first, base]
    assert [run.inputs["champion"] for run in loop.metadata.runs(stage="latency") if run.round == 3] == opponents
    assert loop.metadata.rounds()[3].detail["champion_evaluation"] == loop.metadata.rounds()[0].detail["evaluation"]
    assert "3 label" not in loop.stages(after=len(stages_before)), "labels are not requested twice"


def test_a_kill_after_the_deployment_changes_nothing_and_deploys_no_model_that_was_rolled_back(
    finished_loop: Any, begun_loop: Callable[..., Any], open_loop: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed round still compares with the champion that it has replaced."""
    loop = begun_loop()
    promote = ModelRegistry.promote

    def promote_then_die(self: ModelRegistry, *arguments: Any, **options: Any) -> Any:
        promote(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "promote", promote_then_die)
        with pytest.raises(KeyboardInterrupt):
            loop.run(1)
    assert loop.metadata.round(1).status == "open"
    loop.store.close()
    resumed, rolled_back = (
        open_loop(Path(shutil.copytree(loop.root, loop.root.with_name(name), symlinks=True)))
        for name in ("resumed", "rolled back")
    )
    resumed.run(1)
    assert [deployment.action for deployment in resumed.metadata.deployments()] == ["baseline", "promote"]
    decisions = [item.metadata.rounds()[1].decision for item in (resumed, finished_loop)]
    assert decisions[0]["intervals"] == decisions[1]["intervals"]
    assert decisions[0]["metrics"]["champion"] == decisions[1]["metrics"]["champion"]
    assert resumed.champion == finished_loop.metadata.rounds()[1].candidate
    ModelRegistry(rolled_back.store).rollback("found bad in service")
    rolled_back.run(1)
    assert [entry.action for entry in rolled_back.metadata.deployments()] == ["baseline", "promote", "rollback"]
    assert rolled_back.champion == rolled_back.metadata.rounds()[0].candidate


def test_the_loop_ends_when_no_collect_more_rule_holds(small: Any, evaluated_loop: Callable[..., Any]) -> None:
    gate = {"deploy": ["accuracy >= 0"], "collect_more": ["accuracy < 0"]}
    loop = evaluated_loop(rounds=5, gate=gate)
    for _ in range(2):
        assert loop.run() is None
        assert len(loop.metadata.rounds()) == 4
    # Watched, it waits for a trigger, if there is one.
    assert loop.run(watched=True) is None
    small.configure(loop.root, rounds=5, gate=gate, triggers={"any": ["urgent"]})
    assert loop.run() is None
    waits = loop.run(watched=True)
    assert waits.startswith("a trigger for round 4: urgent (urgent = 0); the champion is good enough")
    loop.run(watched=True, urgent=True, until="drift")
    assert len(loop.metadata.rounds()) == 5


def test_with_a_higher_target_the_loop_resumes(small: Any, evaluated_loop: Callable[..., Any]) -> None:
    loop = evaluated_loop(rounds=5, gate={"deploy": ["accuracy >= 0"], "collect_more": ["accuracy < 0"]})
    loop.run()
    small.configure(loop.root, rounds=5, gate={"deploy": ["accuracy >= 0"], "collect_more": ["accuracy < 2"]})
    loop.run(until="drift")
    assert len(loop.metadata.rounds()) == 5


def test_a_failed_hook_runs_again_with_the_next_run(evaluated_loop: Callable[..., Any]) -> None:
    loop = evaluated_loop(rounds=3, deploy={"command": "sh hook.sh"})
    (loop.root / "hook.sh").write_text('echo "$POSTTRAIN_ACTION" >> actions; test -e works\n')
    loop.run()
    assert loop.metadata.deployments()[-1].hook == "failed"
    (loop.root / "works").touch()
    loop.run()
    loop.run()
    assert loop.metadata.deployments()[-1].hook == "done"
    assert (loop.root / "actions").read_text().split()[-2:] == ["promote", "promote"]
