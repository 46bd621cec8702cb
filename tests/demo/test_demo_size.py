"""The demo is sized to the machine once, and the same command finds it again."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.cli.demo import print_learning_curve
from posttrain.demo import workspace
from posttrain.demo.size import Machine, RoundTimer, choose_size
from posttrain.demo.workspace import prepare_workspace
from posttrain.store.errors import UserError

LAPTOP, SERVER = Machine("float32", 184e9), Machine("bfloat16", 1500e9)
MEAN_WORDS = 17.0


def test_the_largest_size_that_fits_is_chosen() -> None:
    for machine in (LAPTOP, SERVER):
        sizes = [choose_size(minutes, machine, MEAN_WORDS) for minutes in (1, 4, 8, 16, 1000)]
        assert [size.per_round for size in sizes] == sorted(size.per_round for size in sizes)
        assert all(
            size.seconds(machine, MEAN_WORDS) <= 60 * minutes
            for size, minutes in zip(sizes[2:], (8, 16, 1000), strict=True)
        )
        assert (sizes[0].per_round, sizes[-1].per_round, sizes[-1].epochs) == (24, 64, 6)
    assert choose_size(8, SERVER, MEAN_WORDS).per_round > choose_size(8, LAPTOP, MEAN_WORDS).per_round
    assert choose_size(8, LAPTOP, 2 * MEAN_WORDS).per_round < choose_size(8, LAPTOP, MEAN_WORDS).per_round


@pytest.mark.slow
def test_a_resumed_demo_keeps_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace.Machine, "measure", lambda: LAPTOP)
    prepare_workspace(tmp_path / "demo", quick=False, data=None)
    content = (tmp_path / "demo" / "posttrain.yaml").read_bytes()
    monkeypatch.setattr(workspace.Machine, "measure", lambda: SERVER)
    prepare_workspace(tmp_path / "demo", quick=False, data=None)
    assert (tmp_path / "demo" / "posttrain.yaml").read_bytes() == content
    with pytest.raises(UserError, match="another workspace is here"):
        prepare_workspace(tmp_path / "demo", quick=False, data=None, minutes=20)
    prepare_workspace(tmp_path / "other", quick=False, data=None)
    sizes = [
        (values["precision"], values["label"]["per_round"])
        for values in (yaml.safe_load((tmp_path / name / "posttrain.yaml").read_bytes()) for name in ("demo", "other"))
    ]
    assert sizes[0][0] == "float32"
    assert sizes[1] == ("bfloat16", 64)
    assert sizes[0][1] < 64


def test_the_curve_has_a_bar_for_each_round(capsys: pytest.CaptureFixture[str]) -> None:
    rounds: list[dict[str, Any]] = [
        {"labels": 0, "metrics": {"accuracy": 0.0}, "decision": "baseline"},
        {"labels": 24, "metrics": {"accuracy": 0.5}, "decision": "deploy"},
        {"labels": 48, "metrics": {}, "decision": None},
    ]
    print_learning_curve(rounds)
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r" +\d", line)]
    assert [(line.split()[0], line.count("#"), line.split()[-2]) for line in lines] == [
        ("0", 0, "0.0%"),
        ("24", 20, "50.0%"),
    ]


def test_a_demo_whose_rounds_take_too_long_ends_early(caplog: pytest.LogCaptureFixture) -> None:
    for seconds, allowed in (([0, 40, 100, 200], [True, True, True]), ([0, 60, 210, 510], [True, True, False])):
        timer = RoundTimer(8, clock=iter(seconds).__next__)
        with caplog.at_level("INFO", "posttrain"):
            assert [timer.allows(number) for number in (1, 2, 3)] == allowed
    # Round 2 took 300 s, and round 3 trains on half as many labels again.
    assert "round 3 would end after 16 minutes" in caplog.text
