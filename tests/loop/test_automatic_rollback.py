"""A rollback that the gate requests goes to the newest earlier champion that breaks no rule of ``gate.rollback``."""

import logging
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def rule_for(*rounds: Any) -> str:
    """A rule that holds for the models of these rounds and for no other."""
    return " or ".join(f"macro_f1 == {entry.detail['metrics']['macro_f1']!r}" for entry in rounds)


def configure(small: Any, root: Any, rule: str) -> None:
    small.configure(root, train={"epochs": 1}, gate={"deploy": ["accuracy > 2"], "rollback": [rule]})


def test_it_does_not_stop_at_a_model_that_breaks_the_same_rule(
    small: Any, copied_loop: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("posttrain"), "propagate", True)
    base, first, second = copied_loop.metadata.rounds()
    rule = rule_for(first, second)
    configure(small, copied_loop.root, rule)
    with caplog.at_level(logging.INFO, "posttrain"):
        copied_loop.run(3)
    assert copied_loop.metadata.rounds()[3].decision["action"] == "rollback"
    assert copied_loop.champion == base.candidate
    assert f"round 1 cannot return: {rule} (macro_f1 = " in caplog.text


def test_it_steps_over_a_damaged_model(small: Any, copied_loop: Any) -> None:
    base, first, second = copied_loop.metadata.rounds()
    (weights,) = copied_loop.store.artifacts.path(first.candidate).glob("*.safetensors")
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1])
    configure(small, copied_loop.root, rule_for(second))
    type(copied_loop)(copied_loop.root).run(3)  # a process verifies an artifact only once
    assert copied_loop.champion == base.candidate


def test_it_says_that_no_earlier_champion_passes(
    small: Any, copied_loop: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("posttrain"), "propagate", True)
    champion = copied_loop.champion
    configure(small, copied_loop.root, "accuracy < 2")
    copied_loop.run(3)
    assert copied_loop.metadata.rounds()[3].decision["action"] == "refuse"
    assert copied_loop.champion == champion
    assert "the gate requests a rollback, and no earlier champion passes gate.rollback" in caplog.text
