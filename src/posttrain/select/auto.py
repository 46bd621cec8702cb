"""The strategies that are used where none is named."""

from typing import Any

AUTO = "auto"
"""Coverage until what the champion is unsure of says where it errs, then coverage of what it is unsure of.

Where records that lie near each other do not share labels (see `posttrain.select.neighbours`), there is nothing to
cover: records are drawn at random until then, and chosen by doubt alone from then on."""

INFORMED = "facility_location"
"""The best of all strategies on Banking77, by MiniLM's embeddings and by SmolLM2's own; see BENCHMARKS.md."""

BY_DOUBT_ALONE = "margin"
"""The best of all on GSM8K's classes, of which MiniLM's embeddings tell next to nothing; see BENCHMARKS.md."""


def informed_strategy(shared: bool = True) -> str:
    """The strategy once doubts tell errors.

    Args:
        shared: whether neighbours share labels.
    """
    return INFORMED if shared else BY_DOUBT_ALONE


def cold_strategy(shared: bool = True) -> str:
    """The strategy before that: the same coverage without doubts, or none.

    Args:
        shared: whether neighbours share labels.
    """
    return INFORMED if shared else "random"


def informed_options(has_labels: bool) -> dict[str, Any]:
    """What coverage goes by: of written answers a token's doubt, as a long one is hardly probable as a whole."""
    return {"by": "least_confidence" if has_labels else "entropy"}
