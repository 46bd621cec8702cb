"""The gate's decisions, and the rules that it accepts."""

import math
from pathlib import Path

import pytest

from posttrain.evaluate.config import EvaluateConfig
from posttrain.evaluate.metric_names import metric_names
from posttrain.loop.config import load_config
from posttrain.loop.gate import GateConfig, GateDecision, decide
from posttrain.store.errors import UserError

METRICS = metric_names(
    EvaluateConfig.model_validate({"suites": {"test": {}, "safety": {"scorer": "exact_match"}}}), has_labels=True
)
BETTER = {"accuracy": 0.9, "safety": 0.97, "latency_p99": 1.0}
CHAMPION = {"accuracy": 0.8, "safety": 0.96, "latency_p99": 1.0}
GAINS = {"gain.accuracy": 0.1, "gain.accuracy.low": 0.05, "gain.accuracy.high": 0.15}
ISSUE = GateConfig(
    deploy=[
        "accuracy >= champion.accuracy * 1.02",
        "safety >= 0.95",
        "latency_p99 <= champion.latency_p99 * 1.1",
    ],
    rollback=["safety < 0.9"],
    collect_more=["accuracy < 0.9"],
)


def decision_of(gate: GateConfig = ISSUE, champion: dict[str, float] = CHAMPION, **candidate: float) -> GateDecision:
    gate.check(METRICS)
    baseline = {"accuracy": 0.1, "safety": 0.5, "latency_p99": 1.0}
    return decide(gate, {**BETTER, **candidate}, champion, baseline, GAINS)


@pytest.mark.parametrize(
    ("candidate", "champion", "action", "more"),
    [
        ({}, {}, "deploy", False),
        ({"accuracy": 0.85}, {}, "deploy", True),
        ({"accuracy": 0.81}, {}, "refuse", True),
        ({"latency_p99": 1.2}, {}, "refuse", True),
        ({"safety": 0.94}, {}, "refuse", True),
        ({"safety": 0.89}, {}, "refuse", True),
        # The candidate is refused, and the champion it did not beat is good enough.
        ({"accuracy": 0.5}, {"accuracy": 0.95}, "refuse", False),
        # A champion that breaks a rollback rule is rolled back, unless a better candidate replaces it.
        ({"safety": 0.94}, {"safety": 0.89}, "rollback", True),
        ({}, {"safety": 0.89}, "deploy", False),
        # A rollback deploys a model that was not measured: more rounds follow.
        ({"accuracy": 0.5}, {"accuracy": 0.95, "safety": 0.8}, "rollback", True),
    ],
)
def test_the_gate_chooses_the_action(
    candidate: dict[str, float], champion: dict[str, float], action: str, more: bool
) -> None:
    decision = decision_of(champion={**CHAMPION, **champion}, **candidate)
    assert (decision.action, decision.collect_more) == (action, more)


def test_a_rollback_rule_refuses_a_candidate_that_passes_all_deploy_rules() -> None:
    gate = GateConfig(deploy=["accuracy > champion.accuracy"], rollback=["safety < 0.9"])
    decision = decision_of(gate, safety=0.5)
    assert decision.action == "refuse"
    (broken_rule,) = [rule for rule in decision.rules if rule.section == "rollback" and rule.holds]
    assert (broken_rule.rule, broken_rule.values) == ("safety < 0.9", "safety = 0.5")


def test_every_rule_is_recorded_with_its_values() -> None:
    decision = decision_of()
    assert [rule.as_dict() for rule in decision.rules] == [
        {
            "section": "deploy",
            "rule": "accuracy >= champion.accuracy * 1.02",
            "values": "accuracy = 0.9, champion.accuracy = 0.8",
            "holds": True,
        },
        {"section": "deploy", "rule": "safety >= 0.95", "values": "safety = 0.97", "holds": True},
        {
            "section": "deploy",
            "rule": "latency_p99 <= champion.latency_p99 * 1.1",
            "values": "latency_p99 = 1, champion.latency_p99 = 1",
            "holds": True,
        },
        {"section": "rollback", "rule": "safety < 0.9", "values": "safety = 0.97", "holds": False},
        {"section": "collect_more", "rule": "accuracy < 0.9", "values": "accuracy = 0.9", "holds": False},
    ]


def test_without_rules_to_collect_more_all_rounds_run() -> None:
    assert decision_of(GateConfig(deploy=["accuracy > 0"])).collect_more


@pytest.mark.parametrize("rule", ["gain.accuracy.low > 0", "accuracy > baseline.accuracy + 50%"])
def test_rules_may_name_gains_and_baseline_metrics(rule: str) -> None:
    assert decision_of(GateConfig(deploy=[rule])).action == "deploy"
    assert decision_of(GateConfig(deploy=[f"not ({rule})"])).action == "refuse"


def test_an_unmeasured_metric_neither_deploys_nor_rolls_back() -> None:
    gate = GateConfig(deploy=["baseline.macro_f1 < 2"], rollback=["baseline.macro_f1 < 2"])
    decision = decision_of(gate)
    assert decision.action == "refuse"
    assert decision.rules[0].values == "baseline.macro_f1 = nan"
    assert decision_of(accuracy=math.nan).action == "refuse"


@pytest.mark.parametrize("section", ["deploy", "rollback", "collect_more"])
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("acuracy > 0.5", "rule `acuracy > 0.5`: no metric `acuracy`; did you mean `accuracy`?"),
        (
            "champoin.accuracy > 1",
            "rule `champoin.accuracy > 1`: no metric `champoin.accuracy`; did you mean `champion.accuracy`?",
        ),
        (
            "gain.safety.hi > 0",
            "rule `gain.safety.hi > 0`: no metric `gain.safety.hi`; did you mean `gain.safety.high`?",
        ),
        ("1 > 0", "rule `1 > 0` names no metric"),
    ],
)
def test_rules_that_name_no_metric_are_refused(section: str, rule: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        GateConfig.model_validate({section: [rule]}).check(METRICS)
    assert str(caught.value) == f"gate.{section}: {message}"


def test_a_rule_with_a_syntax_error_is_refused() -> None:
    with pytest.raises(UserError, match=r"posttrain.yaml: `deploy`: rule `accuracy >> 1`: .*`>`"):
        GateConfig.read({"deploy": ["accuracy >> 1"]}, "posttrain.yaml")


def test_the_default_is_a_gain_on_the_first_suite_whatever_the_order_of_a_set(tmp_path: Path) -> None:
    """Sets of strings have an order of their own for each choice of strings."""
    for number in range(20):
        suites = f"a{number}: {{scorer: perplexity}}, b{number}: {{}}, c{number}: {{}}"
        (tmp_path / "posttrain.yaml").write_text(
            f"model: tiny\ntask: {{labels: [x, y]}}\ndata: {{pool: p.csv}}\nevaluate: {{suites: {{{suites}}}}}\n"
        )
        assert load_config(tmp_path).gate.deploy == ["gain.log_likelihood.low > 0"]


def test_the_default_requires_a_significant_gain() -> None:
    gate = GateConfig().with_default("gain.accuracy")
    assert decision_of(gate).action == "deploy"
    # One right answer more in 500 may be chance: the interval of the gain includes 0.
    lucky = {"gain.accuracy": 0.002, "gain.accuracy.low": -0.004, "gain.accuracy.high": 0.008}
    assert decide(gate, BETTER, CHAMPION, {}, lucky).action == "refuse"
    assert ISSUE.with_default("gain.accuracy") == ISSUE
