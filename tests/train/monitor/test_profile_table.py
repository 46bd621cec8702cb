"""The table of step time: every second counted once, named in words, with advice on slow parts."""

import pytest

from posttrain.train.monitor.profile import ProfileSummary, profile_advice, time_rows, time_table

PHASES = {"forward": 3.0, "head": 1.0, "backward": 5.0, "optimizer": 0.6, "clip": 0.2, "watch": 0.1, "data": 0.05}
PARTS = {
    "forward": {"linear": 0.7, "attention": 0.2, "rest": 0.1},
    "backward": {"linear": 0.6, "attention": 0.2, "rest": 0.05, "head": 0.1, "sums": 0.05},
}


def summary(**changes: float) -> ProfileSummary:
    phases = PHASES | changes
    return ProfileSummary(sum(phases.values()) + 0.05, phases, PARTS, 2, "cpu")


def test_every_second_is_in_one_row() -> None:
    result = time_rows(summary())
    assert sum(share for _, share, _ in result) == pytest.approx(1)
    shares = {name: share for name, share, _ in result}
    assert shares["forward: linear layers"] == pytest.approx(2.1 / 10)
    assert shares["backward: output head"] == pytest.approx(0.5 / 10)
    assert shares["gradient sums"] == pytest.approx(0.25 / 10)
    assert shares["everything else"] == pytest.approx(0.05 / 10)
    assert all(meaning for _, _, meaning in result)
    assert [name for name, _, _ in result][:2] == ["reading data", "forward: attention"]


def test_an_unknown_phase_has_a_row() -> None:
    assert "gossip" in [name for name, _, _ in time_rows(summary(gossip=1.0))]


def test_the_table_has_seconds_and_shares_of_a_step() -> None:
    text = time_table(summary())
    assert "2 steps of 5 s on cpu" in text
    line = next(line for line in text.splitlines() if line.startswith("optimiser"))
    assert line.split()[1:3] == ["0.3000", "6.0%"]
    assert text.endswith("Nothing takes more than it should.\n")


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"data": 0.5}, "waiting for data: 5% of a step; raise train.loader.prefetch or train.loader.workers"),
        ({"optimizer": 4.0}, "the optimiser: 30% of a step; a larger train.batch_size"),
        ({"checkpoint": 1.0}, "raise train.checkpoint.every_seconds"),
        ({"watch": 0.5}, "leave out a slow entry of train.sinks"),
    ],
)
def test_a_slow_part_gets_advice(changes: dict[str, float], advice: str) -> None:
    (line,) = profile_advice(summary(**changes))
    assert advice in line
    assert line in time_table(summary(**changes))


def test_recomputation_and_small_operations_get_advice() -> None:
    parts = {"forward": {"rest": 1.0}, "backward": {"again": 0.5, "linear": 0.5}}
    result = profile_advice(ProfileSummary(10.0, {"forward": 5.0, "backward": 4.0}, parts, 1, "cpu"))
    assert [line.split(":")[0] for line in result] == ["computing activations again", "norms and activations"]
