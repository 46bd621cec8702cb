"""Formats numbers, and the names of metrics and reasons."""

from posttrain.report.charts.bars import format_seconds
from posttrain.store.message import Message

_SHARES = ("accuracy", "f1", "rate", "precision", "recall")


def metric_text(name: str, value: float) -> str:
    """Formats a metric in its usual unit: percent for shares, milliseconds for latencies."""
    last = name.rsplit(".", 1)[-1]
    if last.startswith("latency"):
        return f"{1000 * value:,.0f} ms"
    if last.endswith("seconds"):
        return format_seconds(value)
    if is_share(name, value):
        return f"{100 * value:.1f}%"
    return f"{value:,.4g}"


def number_text(value: float) -> str:
    """Formats a number of any size: ``12,000``, ``1.034``, ``7.5e-5``."""
    # No exponent for large numbers: 12,000 tokens read better than 1.2e+04.
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-3:
        share, power = f"{value:.2e}".split("e")
        return f"{float(share):g}e{int(power)}"
    return f"{value:.4g}"


def is_share(name: str, value: float = 0.0) -> bool:
    """Returns whether the metric is a share of the whole, by its name and value."""
    last = name.rsplit(".", 1)[-1]
    # The value decides too: a score of one's own may be called `..._rate` and exceed 1.
    return last.endswith(_SHARES) and 0 <= value <= 1


def metric_name(name: str) -> Message:
    """Formats ``macro_f1`` as ``macro F1``, ``latency_p50`` as ``latency p50``."""
    return Message(name.replace("_", " ").replace("f1", "F1"))


def points_text(difference: float) -> str:
    """Formats a difference of shares in percentage points, with its sign: ``+5.3``."""
    return signed_text(100 * difference)


def signed_text(value: float) -> str:
    """Formats a number with its sign: ``+5.3``, ``−0.7``."""
    # A minus sign is as wide as a plus, unlike a hyphen: columns of differences line up.
    return f"{value:+.1f}".replace("-", "−")


def percent_text(share: float) -> str:
    """Formats a share of records: ``12.5%``."""
    # 0.0% would claim that there is none.
    return "under 0.1%" if 0 < share < 0.0005 else f"{100 * share:.1f}%"


def level_text(level: float) -> str:
    """Formats an interval's coverage: ``95%``."""
    return f"{100 * level:g}%"


def reason_text(reason: str) -> Message:
    """Formats a name in words: ``cold_start`` as ``cold start``."""
    return Message(reason.replace("_", " "))


def bytes_text(value: float) -> str:
    """Formats memory in decimal units: ``640 MB``, ``2.9 GB``."""
    return f"{value / 1e9:.3g} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"
