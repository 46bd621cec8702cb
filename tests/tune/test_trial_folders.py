"""Checkpoints of paused trials give way where the disk is almost full, and the study is the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.tune import Float, TrialContext, TuneResult, minimize


def anytime(trial: TrialContext) -> None:
    """Improves at each of nine steps, and continues from its checkpoint."""
    path = trial.folder / "step"
    step = int(path.read_text()) if path.exists() else 0
    while step < 9:
        step += 1
        path.write_text(str(step))
        trial.report(step, (trial["x"] - 0.3) ** 2 + 1 / step)


def run(out: Path, scheduler: str) -> TuneResult:
    options: dict[str, Any] = {"name": scheduler, "max_resource": 9}
    return minimize(anytime, {"x": Float(0, 1)}, budget="15 trials", scheduler=options, seed=5, out=out)


def outcomes(result: TuneResult) -> list[tuple[Any, ...]]:
    return [(trial.settings, trial.state, [(r.step, r.value) for r in trial.reports]) for trial in result.trials]


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "removes"), [("asha", True), ("hyperband", True), ("pbt", False)])
def test_on_a_full_disk_checkpoints_of_the_worst_are_removed(
    scheduler: str, removes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(tmp_path / "expected", scheduler)
    trials = tmp_path / "out" / "trials"

    def folders() -> set[int]:
        return {int(path.name) for path in trials.iterdir() if path.name.isdigit()}

    # A disk with room for three folders of a byte.
    usage = "posttrain.tune.trial_folders.shutil.disk_usage"
    monkeypatch.setattr(usage, lambda path: SimpleNamespace(free=3 - len(folders())))
    result = run(tmp_path / "out", scheduler)
    assert outcomes(result) == outcomes(expected)
    removed = [line for line in caplog.messages if "the disk is almost full: removed the checkpoint" in line]
    assert bool(removed) is removes
    assert result.best is not None
    assert result.best.number in folders()
    assert not removes or len(folders()) <= 4
