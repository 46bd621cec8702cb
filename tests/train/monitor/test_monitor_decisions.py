"""From findings to actions: that of the policy, and escalation."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from posttrain.store.errors import UserError, WorkError
from posttrain.train.config import TrainConfig
from posttrain.train.monitor import decisions as module
from posttrain.train.monitor.decisions import (
    ACTIONS,
    KINDS,
    POLICIES,
    Action,
    Finding,
    Kind,
    MonitorDecision,
    decide,
    stop_error,
)

NORMAL = POLICIES["normal"]


def actions(policy: Mapping[Kind, Action], findings: Sequence[tuple[Kind, int]]) -> list[Action]:
    """The actions for consecutive findings."""
    decisions: list[MonitorDecision] = []
    for kind, step in findings:
        decisions.append(decide(Finding(kind, step, "it went wrong"), policy, decisions))
    return [decision.action for decision in decisions]


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_finding_gets_the_action_of_the_policy(kind: Kind) -> None:
    for policy in (NORMAL, POLICIES["strict"]):
        assert actions(policy, [(kind, 10)]) == [policy[kind]]


@pytest.mark.parametrize(
    ("limits", "changes", "findings", "expected"),
    [
        ({}, {}, [("nan", 10), ("nan", 210), ("nan", 220)], ["rollback", "lower_rate", "stop"]),
        ({}, {}, [("nan", 10), ("nan", 211)], ["rollback", "rollback"]),
        # Training was rolled back from 900 to an earlier step and failed on the way to 900.
        ({}, {}, [("nan", 900), ("nan", 400)], ["rollback", "lower_rate"]),
        ({}, {}, [("nan", 10), ("divergence", 20), ("nan", 30)], ["rollback", "rollback", "lower_rate"]),
        (
            {"MAX_SKIPS": 2},
            {},
            [("explosion", step) for step in (10, 11, 12, 13, 14)],
            ["skip", "skip", "rollback", "lower_rate", "stop"],
        ),
        ({"MAX_SKIPS": 2}, {}, [("explosion", step) for step in (10, 200, 300, 600)], ["skip"] * 4),
        ({"MAX_ROLLBACKS": 0}, {}, [("divergence", 10)], ["stop"]),
        ({}, {}, [("nan", 1000 * turn) for turn in range(4)], ["rollback", "rollback", "rollback", "stop"]),
        # Lowering the rate after a fault rolls back too, and counts.
        (
            {"MAX_ROLLBACKS": 2},
            {"nan": "lower_rate"},
            [("nan", 0), ("divergence", 1000), ("nan", 2000)],
            ["lower_rate", "rollback", "stop"],
        ),
        ({}, {"explosion": "warn"}, [("explosion", step) for step in range(20)], ["warn"] * 20),
        ({}, {}, [("no_supervised", step) for step in range(20)], ["skip"] * 20),
        ({}, {}, [("plateau", step) for step in range(5)], ["warn"] * 5),
        (
            {"MAX_ROLLBACKS": 0},
            {"plateau": "lower_rate"},
            [("plateau", 1), ("plateau", 2)],
            ["lower_rate", "lower_rate"],
        ),
        ({}, {"dead_layers": "rollback"}, [("dead_layers", s) for s in range(4)], ["rollback"] * 3 + ["stop"]),
    ],
)
def test_escalation(
    limits: dict[str, int],
    changes: dict[Kind, Action],
    findings: list[tuple[Kind, int]],
    expected: list[Action],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(module, name, limit)
    assert actions(NORMAL | changes, findings) == expected


def test_actions_that_restore_or_drop_gradients() -> None:
    restores = {(kind, action) for kind in KINDS for action in ACTIONS if decision(kind, action).restores}
    faults = ("nan", "explosion", "divergence")
    assert restores == {(kind, "rollback") for kind in KINDS} | {(kind, "lower_rate") for kind in faults}
    drops = {action for action in ACTIONS if decision("nan", action).drops_gradient}
    assert drops == {"skip", "rollback", "lower_rate", "stop"}
    assert not decision("plateau", "lower_rate").drops_gradient


def decision(kind: Kind, action: Action) -> MonitorDecision:
    return MonitorDecision(Finding(kind, 3, "it went wrong"), action)


def test_a_stop_error_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions: list[MonitorDecision] = []
    for step in (10, 20, 30):
        decisions.append(decide(Finding("nan", step, "loss is nan"), NORMAL, decisions))
    error = stop_error(decisions[-1])
    assert isinstance(error, WorkError)
    assert str(error) == "training stopped at step 30: loss is nan (lower rate at step 20 did not help)"
    monkeypatch.setattr(module, "MAX_ROLLBACKS", 1)
    final_decision = decide(Finding("nan", 900, "loss is nan"), NORMAL, decisions[:2])
    assert str(stop_error(final_decision)).endswith("loss is nan (rolled back 2 times before)")


@pytest.mark.parametrize("value", ["off", False])
def test_the_monitor_is_switched_off_as_yaml_reads_it(value: Any) -> None:
    assert TrainConfig.read({"watch": value}, "test").watch == "off"
    with pytest.raises(UserError, match="watch"):
        TrainConfig.read({"watch": True}, "test")


def test_only_a_restore_counts_as_a_rollback() -> None:
    decisions: list[MonitorDecision] = []
    for step in range(0, 4000, 500):
        finding = Finding("divergence", step, "the loss has risen")
        decisions.append(decide(finding, NORMAL, decisions, can_go_back=False))
    assert {(item.action, item.restores, item.drops_gradient) for item in decisions} == {("lower_rate", False, True)}
    assert [MonitorDecision.from_json(item.to_json()) for item in decisions] == decisions
