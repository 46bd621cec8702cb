"""From a finding to an action: the configured one, or a graver one where that has not helped."""

from collections.abc import Sequence

from posttrain.store.errors import WorkError
from posttrain.train.watch.config import WatchConfig
from posttrain.train.watch.findings import ACTIONS, FAULTS, Action, Decision, Finding


def decide(finding: Finding, config: WatchConfig, taken: Sequence[Decision], *, can_go_back: bool = True) -> Decision:
    """What to do about a finding.

    A fault (NaN, explosion, divergence) of a kind that was acted on up to ``again_within`` steps ago, or at a later
    step that training has gone back from, takes the next graver action: skip, rollback, lower rate, stop. A skip has
    to have happened ``max_skips`` times first. Past ``max_rollbacks`` rollbacks of any kind the training stops.
    Warnings, and what no weights are in doubt for, stay as configured. Where there is nothing to go back to, the step
    is skipped instead, or the rate lowered after a divergence; where that has not helped, training stops at no number.

    Args:
        taken: earlier decisions of this training, oldest first, those that were rolled back from included.
        can_go_back: whether there is a checkpoint.
    """
    action: Action = getattr(config, finding.kind).action
    why = ""
    if finding.kind in FAULTS and action != "warn":
        recent = _recent(finding, config.again_within, taken)
        if recent and recent[-1].gravity >= ACTIONS.index(action):
            action, why = _escalated(recent, config)
    if action == "rollback" and not can_go_back:
        recent = _recent(finding, config.again_within, taken)
        skips = sum(one.action == "skip" for one in recent)
        action, why = _without_checkpoint(finding, _too_many(skips, config) if skips >= config.max_skips else "")
    decision = Decision(finding, action, why, can_go_back)
    rollbacks = sum(earlier.restores for earlier in taken)
    if decision.restores and rollbacks >= config.max_rollbacks:
        return Decision(finding, "stop", f"went back {rollbacks} times, and max_rollbacks is {config.max_rollbacks}")
    return decision


def _too_many(skips: int, config: WatchConfig) -> str:
    return f"{skips} skips in {config.again_within} steps did not help"


def _without_checkpoint(finding: Finding, tried: str) -> tuple[Action, str]:
    """What is done instead of going back; ``tried`` says what has not helped, if anything was tried."""
    why = f"{tried}, and there is no checkpoint to go back to" if tried else "there is no checkpoint to go back to"
    if tried and finding.kind == "nan":
        return "stop", why
    return "lower_rate" if tried or finding.kind == "divergence" else "skip", why


def stopped(decision: Decision) -> WorkError:
    """The error that ends a training after the decision to stop."""
    why = f" ({decision.why})" if decision.why else ""
    return WorkError(f"training stopped at step {decision.finding.step}: {decision.finding.what}{why}")


def _recent(finding: Finding, within: int, taken: Sequence[Decision]) -> list[Decision]:
    return [one for one in taken if one.finding.kind == finding.kind and finding.step - one.finding.step <= within]


def _escalated(recent: Sequence[Decision], config: WatchConfig) -> tuple[Action, str]:
    last = recent[-1]
    times = sum(one.action == last.action for one in recent)
    if last.action == "skip" and times < config.max_skips:
        return "skip", ""
    done = f"{last.action.replace('_', ' ')} at step {last.finding.step} did not help"
    why = _too_many(times, config) if last.action == "skip" else done
    return ACTIONS[min(last.gravity + 1, len(ACTIONS) - 1)], why
