"""Rounds that end in a refusal or a roll-back, and decisions made by hand in between."""

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
def planted(small: Any) -> Callable[..., Path]:
    """A workspace whose second round is labelled wrongly throughout."""

    def create(name: str = "workspace", **changes: Any) -> Path:
        label = {"per_round": 20, "error_rate": {2: 1.0}} | changes.pop("label", {})
        gate = {"deploy": ["accuracy > champion.accuracy"]}
        root: Path = small(name, rounds=3, label=label, train=LEARNS, **({"gate": gate} | changes))
        small.write(root / "test.csv", small.rows()[60:160])  # enough for a surely lower accuracy
        return root

    return create


@pytest.fixture(scope="module")
def two_rounds(small_anywhere: Any, loop_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace after two of its three rounds; both candidates were deployed."""
    root: Path = small_anywhere(tmp_path_factory.mktemp("decisions"))(rounds=3)
    loop = loop_class(root)
    loop.run(2)
    loop.store.close()
    return root


@pytest.fixture
def after_two(two_rounds: Path, open_loop: Open, tmp_path: Path) -> Any:
    """The loop of a copy of `two_rounds` in the folder ``workspace``."""
    shutil.copytree(two_rounds, tmp_path / "workspace", symlinks=True)
    return open_loop(tmp_path / "workspace")


def test_a_bad_round_is_refused_and_its_labels_set_aside(
    planted: Callable[..., Path], open_loop: Open, small: Any
) -> None:
    loop = open_loop(planted())
    loop.run()
    good, bad, after = loop.metadata.rounds()[1:]
    assert good.detail["metrics"]["accuracy"] >= 0.9
    assert bad.detail["metrics"]["accuracy"] < good.detail["metrics"]["accuracy"]
    assert bad.decision["action"] == "refuse"
    (interval,) = bad.decision["intervals"].values()
    assert interval["high"] < 0
    assert bad.detail["set_aside"]
    assert bad.detail["carry"] == good.detail["dataset"]
    first, spoiled, third = (loop.labelled_inputs(round) for round in (1, 2, 3))
    assert set(loop.trained_on(2)) == {*first, *spoiled}
    assert set(loop.trained_on(3)) == {*first, *third}
    assert after.detail["labels"] == 40
    # What is set aside can be chosen again: 40 of 60 records were free, and 20 of them had been labelled wrongly.
    assert loop.metadata.artifact(after.detail["scores"]).meta["pool"] == 40
    assert set(spoiled) & set(third)
    truth = {row["text"]: row["label"] for row in small.rows()}
    records = {record["input_id"]: record for record in _records(loop, 3)}
    assert all(truth[record["prompt"][0]["content"]] == record["completion"] for record in records.values())


def _records(loop: Any, round: int) -> list[dict[str, Any]]:
    import pyarrow.parquet as parquet

    dataset = loop.metadata.rounds()[round].detail["dataset"]
    rows: list[dict[str, Any]] = parquet.read_table(loop.store.artifacts.path(dataset) / "records.parquet").to_pylist()
    return rows


@pytest.mark.parametrize(("policy", "aside"), [("keep", False), ("set_aside", True)])
def test_the_config_decides_about_refused_labels(small: Any, open_loop: Open, policy: str, aside: bool) -> None:
    loop = open_loop(small(gate={"deploy": ["accuracy > 2"]}, label={"when_refused": policy}))
    loop.run()
    first, second = loop.metadata.rounds()[1:]
    assert [first.decision["action"], second.decision["action"]] == ["refuse", "refuse"]
    assert first.detail["set_aside"] is aside
    assert second.detail["labels"] == (12 if aside else 24)
    assert loop.champion == loop.metadata.rounds()[0].candidate


def test_the_gate_rolls_back(small: Any, after_two: Any) -> None:
    loop = after_two
    first, second = loop.metadata.rounds()[1:]
    assert loop.champion == second.candidate
    small.configure(
        loop.root, gate={"deploy": ["accuracy > 2"], "rollback": ["accuracy < 2"], "collect_more": ["accuracy > 2"]}
    )
    loop.run(3)
    third = loop.metadata.rounds()[3]
    assert third.decision["action"] == "rollback"
    assert third.decision["collect_more"]
    assert loop.champion == first.candidate
    last = loop.metadata.deployments()[-1]
    assert (last.action, last.round, last.model_id) == ("rollback", 3, first.candidate)
    assert "accuracy < 2" in last.reason
    loop.run(4)
    loop.run(5)
    assert [entry.decision["action"] for entry in loop.metadata.rounds()[4:]] == ["rollback", "refuse"]
    assert loop.champion == loop.metadata.rounds()[0].candidate


def test_a_kill_within_a_roll_back_rolls_back_once(small: Any, after_two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = after_two
    small.configure(loop.root, gate={"deploy": ["accuracy > 2"], "rollback": ["accuracy < 2"]})
    rollback = ModelRegistry.rollback

    def killed(self: ModelRegistry, *arguments: Any, **options: Any) -> Any:
        rollback(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "rollback", killed)
        with pytest.raises(KeyboardInterrupt):
            loop.run(3)
    loop.run(3)
    assert [entry.action for entry in loop.metadata.deployments()] == ["baseline", "promote", "promote", "rollback"]
    assert loop.metadata.rounds()[3].decision["action"] == "rollback"
    assert loop.champion == loop.metadata.rounds()[1].candidate


def test_the_candidate_has_to_beat_whom_the_user_put_in_service_meanwhile(after_two: Any) -> None:
    loop = after_two
    loop.run(3, until="label")
    base, first, second = (entry.candidate for entry in loop.metadata.rounds()[:3])
    assert loop.metadata.rounds()[3].champion_before == second
    asked = loop.stages()
    ModelRegistry(loop.store).rollback("found bad in service")
    loop.run(3)
    third = loop.metadata.rounds()[3]
    (timed,) = [run.inputs for run in loop.metadata.runs(stage="latency") if run.round == 3]
    assert timed["champion"] == first
    assert third.detail["champion_evaluation"] == loop.metadata.rounds()[1].detail["evaluation"]
    assert "3 label" not in loop.stages(after=len(asked)), "people are not asked twice"
    assert base != first != second


def test_a_roll_back_during_the_judgement_counts(after_two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = after_two
    first, second = (entry.candidate for entry in loop.metadata.rounds()[1:])
    opponents = []

    def timed(context: Any, candidate: str, champion: str, test: str) -> Any:
        opponents.append(champion)
        if len(opponents) == 1:
            ModelRegistry(loop.store).rollback("found bad in service")
        return measure_latencies(context, candidate, champion, test)

    monkeypatch.setattr("posttrain.loop.stages.evaluate.measure_latencies", timed)
    loop.run(3)
    assert opponents == [second, first]
    assert loop.metadata.rounds()[3].detail["champion_evaluation"] == loop.metadata.rounds()[1].detail["evaluation"]


def test_what_was_rolled_back_before_the_round_ended_stays_back(
    small: Any, open_loop: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = open_loop(small(rounds=1))
    promote = ModelRegistry.promote

    def killed(self: ModelRegistry, *arguments: Any, **options: Any) -> Any:
        promote(self, *arguments, **options)
        if options["round"] == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "promote", killed)
        with pytest.raises(KeyboardInterrupt):
            loop.run()
    ModelRegistry(loop.store).rollback("found bad in service")
    loop.run()
    assert [entry.action for entry in loop.metadata.deployments()] == ["baseline", "promote", "rollback"]
    assert loop.champion == loop.metadata.rounds()[0].candidate


def test_good_enough(small: Any, open_loop: Open) -> None:
    root = small(rounds=4, gate={"deploy": ["accuracy >= 0"], "collect_more": ["accuracy < 0"]})
    loop = open_loop(root)
    assert loop.run() is None
    assert len(loop.metadata.rounds()) == 2
    assert loop.run() is None
    assert len(loop.metadata.rounds()) == 2
    # A higher bar, and it goes on.
    small.configure(root, rounds=4, gate={"deploy": ["accuracy >= 0"], "collect_more": ["accuracy < 2"]})
    loop.run(3)
    assert len(loop.metadata.rounds()) == 4


def test_hooks_of_a_loop(small: Any, open_loop: Open) -> None:
    root = small(rounds=1, deploy={"command": "sh hook.sh"})
    (root / "hook.sh").write_text('echo "$POSTTRAIN_ACTION" >> told; test -e works\n')
    loop = open_loop(root)
    loop.run()
    assert [entry.hook for entry in loop.metadata.deployments()] == ["failed", "failed"]
    (root / "works").touch()
    loop.run()
    assert [entry.hook for entry in loop.metadata.deployments()] == ["failed", "done"]
    loop.run()
    assert (root / "told").read_text().split() == ["baseline", "promote", "promote"]
