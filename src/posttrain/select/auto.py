"""The strategy that is used where none is named."""

from typing import Any

AUTO = "auto"
"""Coverage until what the champion is unsure of says where it errs, then coverage of what it is unsure of."""

INFORMED = "facility_location"
"""The best of all strategies on Banking77, by MiniLM's embeddings and by SmolLM2's own; see BENCHMARKS.md."""


def informed_options(has_labels: bool) -> dict[str, Any]:
    """What it goes by: of written answers the doubt per token, as a long one has next to no probability as a whole."""
    return {"by": "least_confidence" if has_labels else "entropy"}
