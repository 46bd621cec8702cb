"""From findings to actions: the configured one, and escalation."""

from collections.abc import Sequence
from typing import Any

import pytest

from posttrain.store.errors import UserError, WorkError
from posttrain.train.monitor.config import MonitorConfig
from posttrain.train.monitor.decisions import ACTIONS, KINDS, Action, Finding, Kind, MonitorDecision, decide, stop_error

DEFAULTS: dict[Kind, Action] = {
    "nan": "rollback",
    "explosion": "skip",
    "divergence": "rollback",
    "plateau": "warn",
    "dead_layers": "warn",
    "no_supervised": "skip",
}


def config(**changes: Any) -> MonitorConfig:
    return MonitorConfig.read(changes, "test")


def actions(monitor_config: MonitorConfig, findings: Sequence[tuple[Kind, int]]) -> list[Action]:
    """The actions for consecutive findings."""
    decisions: list[MonitorDecision] = []
    for kind, step in findings:
        decisions.append(decide(Finding(kind, step, "it went wrong"), monitor_config, decisions))
    return [decision.action for decision in decisions]


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_finding_gets_the_configured_action(kind: Kind) -> None:
    assert actions(MonitorConfig(), [(kind, 10)]) == [DEFAULTS[kind]]
    assert actions(config(**{kind: {"action": "stop"}}), [(kind, 10)]) == ["stop"]


@pytest.mark.parametrize(
    ("changes", "findings", "expected"),
    [
        ({}, [("nan", 10), ("nan", 210), ("nan", 220)], ["rollback", "lower_rate", "stop"]),
        ({}, [("nan", 10), ("nan", 211)], ["rollback", "rollback"]),
        ({"again_within": 500}, [("nan", 10), ("nan", 211)], ["rollback", "lower_rate"]),
        # Training was rolled back from 900 to an earlier step and failed on the way to 900.
        ({}, [("nan", 900), ("nan", 400)], ["rollback", "lower_rate"]),
        ({}, [("nan", 10), ("divergence", 20), ("nan", 30)], ["rollback", "rollback", "lower_rate"]),
        (
            {"max_skips": 2},
            [("explosion", step) for step in (10, 11, 12, 13, 14)],
            ["skip", "skip", "rollback", "lower_rate", "stop"],
        ),
        ({"max_skips": 2}, [("explosion", step) for step in (10, 200, 300, 600)], ["skip"] * 4),
        ({"max_rollbacks": 1}, [("nan", 10), ("nan", 900)], ["rollback", "stop"]),
        ({"max_rollbacks": 0}, [("divergence", 10)], ["stop"]),
        ({}, [("nan", 1000 * turn) for turn in range(4)], ["rollback", "rollback", "rollback", "stop"]),
        # Lowering the rate after a fault rolls back too, and counts.
        (
            {"nan": {"action": "lower_rate"}, "max_rollbacks": 2},
            [("nan", 0), ("divergence", 1000), ("nan", 2000)],
            ["lower_rate", "rollback", "stop"],
        ),
        ({"explosion": {"action": "warn"}}, [("explosion", step) for step in range(20)], ["warn"] * 20),
        ({}, [("no_supervised", step) for step in range(20)], ["skip"] * 20),
        ({}, [("plateau", step) for step in range(5)], ["warn"] * 5),
        (
            {"plateau": {"action": "lower_rate"}, "max_rollbacks": 0},
            [("plateau", 1), ("plateau", 2)],
            ["lower_rate", "lower_rate"],
        ),
        ({"dead_layers": {"action": "rollback"}}, [("dead_layers", s) for s in range(4)], ["rollback"] * 3 + ["stop"]),
    ],
)
def test_escalation(changes: dict[str, Any], findings: list[tuple[Kind, int]], expected: list[Action]) -> None:
    assert actions(config(**changes), findings) == expected


def test_actions_that_restore_or_drop_gradients() -> None:
    restores = {(kind, action) for kind in KINDS for action in ACTIONS if decision(kind, action).restores}
    faults = ("nan", "explosion", "divergence")
    assert restores == {(kind, "rollback") for kind in KINDS} | {(kind, "lower_rate") for kind in faults}
    drops = {action for action in ACTIONS if decision("nan", action).drops_gradient}
    assert drops == {"skip", "rollback", "lower_rate", "stop"}
    assert not decision("plateau", "lower_rate").drops_gradient


def decision(kind: Kind, action: Action) -> MonitorDecision:
    return MonitorDecision(Finding(kind, 3, "it went wrong"), action)


def test_a_stop_error_gives_the_reason() -> None:
    decisions: list[MonitorDecision] = []
    for step in (10, 20, 30):
        decisions.append(decide(Finding("nan", step, "loss is nan"), MonitorConfig(), decisions))
    error = stop_error(decisions[-1])
    assert isinstance(error, WorkError)
    assert str(error) == "training stopped at step 30: loss is nan (lower rate at step 20 did not help)"
    final_decision = decide(Finding("nan", 900, "loss is nan"), config(max_rollbacks=1), decisions[:2])
    assert str(stop_error(final_decision)).endswith("loss is nan (rolled back 2 times, and max_rollbacks is 1)")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"nan": {"action": "warn"}}, "nan.action"),
        ({"plateau": {"action": "skip"}}, "plateau.action"),
        ({"divergence": {"action": "skip"}}, "divergence.action"),
        ({"explosion": {"zed": 3}}, "explosion.zed"),
        ({"rate_factor": 1.0}, "rate_factor"),
    ],
)
def test_invalid_actions_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=key) as error:
        config(**changes)
    assert "\n" not in str(error.value)


def test_only_a_restore_counts_as_a_rollback() -> None:
    decisions: list[MonitorDecision] = []
    for step in range(0, 4000, 500):
        finding = Finding("divergence", step, "the loss has risen")
        decisions.append(decide(finding, MonitorConfig(), decisions, can_go_back=False))
    assert {(item.action, item.restores, item.drops_gradient) for item in decisions} == {("lower_rate", False, True)}
    assert [MonitorDecision.from_json(item.to_json()) for item in decisions] == decisions
