"""What can be said about a batch of labels without a second annotator."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def summary(labelled: pa.Table, suggestions: Sequence[str | None] | None = None) -> dict[str, Any]:
    """Figures for the report.

    Args:
        labelled: RECORD table as an annotator returns it.
        suggestions: what the model, or an earlier annotator, answered to the same records.

    Returns:
        ``labels``: how many; ``classes``: how many of each, most frequent first; ``annotators``: how many
        by whom; ``seconds``: the time spent (None where unknown); ``compared`` and ``agreement``: how many
        have a suggestion, and the share of them that equals it (None where none has).
    """
    answers = labelled["completion"].to_pylist()
    sources = [json.loads(meta or "{}").get("labelled_by", {}) for meta in labelled["meta"].to_pylist()]
    times = [source["seconds"] for source in sources if source.get("seconds") is not None]
    pairs = [
        (answer, suggestion)
        for answer, suggestion in zip(answers, suggestions or [None] * len(answers), strict=True)
        if suggestion is not None
    ]
    classes = Counter(answers)
    return {
        "labels": len(answers),
        "classes": dict(sorted(classes.items(), key=lambda item: (-item[1], str(item[0])))),
        "annotators": dict(Counter(source.get("annotator", "unknown") for source in sources)),
        "seconds": sum(times) if times else None,
        "compared": len(pairs),
        "agreement": sum(answer == suggestion for answer, suggestion in pairs) / len(pairs) if pairs else None,
    }
