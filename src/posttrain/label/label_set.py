"""Answers that must come from a closed set."""

import difflib
from collections.abc import Sequence


def did_you_mean(label: str, labels: Sequence[str]) -> str | None:
    """A question naming the label nearest to ``label``; None when the set is empty."""
    nearest = difflib.get_close_matches(label, labels, n=1, cutoff=0.0)
    return f"did you mean `{nearest[0]}`?" if nearest else None
