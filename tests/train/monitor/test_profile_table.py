"""The table of step time: every second counted once, with advice on slow phases."""

import pytest

from posttrain.train.monitor.profile import ProfileSummary, time_table

PHASES = {"forward": 3.0, "head": 1.0, "backward": 5.0, "optimizer": 0.6, "clip": 0.2, "watch": 0.1, "data": 0.05}


def summary(**changes: float) -> ProfileSummary:
    phases = PHASES | changes
    return ProfileSummary(sum(phases.values()) + 0.05, phases, 2, "cpu", 4310)


def test_every_second_is_in_one_row() -> None:
    shares = summary(gossip=1.0).shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] == pytest.approx(3 / 11)
    assert shares["everything else"] == pytest.approx(0.05 / 11)
    assert next(iter(shares)) == "data"
    assert "gossip" in shares, "an unknown phase has a row"


def test_the_table_has_seconds_and_shares_of_a_step() -> None:
    text = time_table(summary())
    assert "2 steps of 5 s on cpu" in text
    line = next(line for line in text.splitlines() if line.startswith("optimiser"))
    assert line.split()[1:3] == ["0.3000", "6.0%"]
    assert text.endswith("Nothing takes more than it should.\n")


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"data": 0.5}, "reading data: 5% of a step; raise train.loader.prefetch or train.loader.workers"),
        ({"optimizer": 4.0}, "optimiser: 30% of a step; a larger train.batch_size"),
        ({"checkpoint": 1.0}, "raise train.checkpoint.every_seconds"),
        ({"watch": 0.5}, "leave out a slow entry of train.sinks"),
    ],
)
def test_a_slow_phase_gets_advice(changes: dict[str, float], advice: str) -> None:
    assert advice in time_table(summary(**changes)).splitlines()[-1]
