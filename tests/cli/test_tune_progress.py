"""The lines that ``posttrain tune`` prints as it works: what is done, what runs, what is left of the budget."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.tune import TrialContext, minimize

Call = Callable[..., Any]


@pytest.mark.slow
def test_a_line_a_minute_says_that_trials_run(
    posttrain: Call, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.tune.progress._SILENT_SECONDS", 0.0)

    def objective(trial: TrialContext) -> float:
        if trial.number == 2:
            time.sleep(0.3)
            trial.show_life()
            assert "3 trials: 2 finished, 1 running; 1 trial left" in posttrain("tune", "show", tmp_path / "out").out
        return -float(trial.number)

    with caplog.at_level("INFO", "posttrain"):
        minimize(objective, {"x": {"float": [0, 1]}}, budget="4 trials", out=tmp_path / "out")
    lines = [line.split(" · ") for line in caplog.messages if "1 trial running" in line]
    assert [len(line) for line in lines] == [3]
    assert re.fullmatch(r"  1 trial running, [\d.]+s so far", lines[0][0])
    assert lines[0][1] == "best -1 (trial 1)"
    assert re.fullmatch(r"1 trial left, about [\d.]+s to go", lines[0][2])
    content = json.loads(posttrain("tune", "show", tmp_path / "out", "--json").out)
    assert content["budget_left"] == "0 trials left"


def test_a_line_says_how_many_are_done_and_what_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "posttrain"):
        minimize(lambda trial: -trial.number, {"a": {"float": [0, 1]}}, budget="3 trials", sampler="random")
    lines = [record.getMessage().split(" · ")[1:] for record in caplog.records if "best" in record.getMessage()]
    assert lines == [
        ["1 done", "best 0 (trial 0)", "2 trials left"],
        ["2 done", "best -1 (trial 1)", "1 trial left"],
        ["3 done", "best -2 (trial 2)", "0 trials left"],
    ]
