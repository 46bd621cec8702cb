"""What the loop says of metrics and decisions, in one line."""

from typing import Any

_HEADLINES = ("accuracy", "macro_f1", "token_f1", "score", "perplexity", "invalid_rate", "latency_p99")


def because(found: dict[str, Any]) -> str:
    """The rules that decided, in one line."""
    wanted = found["action"] == "deploy"
    sections = {"deploy": ("deploy",), "refuse": ("deploy", "rollback"), "rollback": ("rollback",)}[found["action"]]
    rules = [rule for rule in found["rules"] if rule["section"] in sections]
    decisive = [rule for rule in rules if rule["holds"] == (wanted or rule["section"] == "rollback")]
    return "; ".join(f"{rule['rule']} ({rule['values']})" for rule in decisive)


def shown(metrics: dict[str, float]) -> str:
    """The headline metrics."""
    named = [name for name in _HEADLINES if name in metrics] or list(metrics)[:3]
    return ", ".join(f"{name} {metrics[name]:.3f}" for name in named)
