"""The strategy that is used where none is named."""

from typing import Any

AUTO = "auto"
"""Coverage until what the champion is unsure of says where it errs, then coverage of what it is unsure of."""

INFORMED = "facility_location"
INFORMED_OPTIONS: dict[str, Any] = {"by": "least_confidence"}
"""The best of all strategies on Banking77, by MiniLM's embeddings and by SmolLM2's own; see BENCHMARKS.md."""
