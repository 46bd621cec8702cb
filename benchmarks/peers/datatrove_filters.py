"""Runs datatrove's filters with their defaults, for ``filters.py``, in datatrove's own environment.

    python datatrove_filters.py TEXTS own|spaces

TEXTS is a file with a JSON list. ``own`` uses the words of datatrove's tokenizer for English, ``spaces`` those split by
whitespace. Prints for each filter the processor seconds, null or the reason of the rejection for each text, and the
texts, which one filter changes; then the seconds of all four filters on one text after the other.
"""

import json
import sys
import time
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    fineweb_quality_filter,
    gopher_quality_filter,
    gopher_repetition_filter,
)
from datatrove.utils.text import split_into_words


def rejection_reason(decision: bool | tuple[bool, str]) -> str | None:
    """Return the reason of a filter's decision; None if the text passes."""
    return decision[1] if isinstance(decision, tuple) else None if decision else "rejected"


def main(source: str, splitter: str) -> None:
    texts = json.loads(Path(source).read_text(encoding="utf-8"))
    if splitter == "spaces":
        for module in (fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter):
            module.split_into_words = lambda text, _: text.split()
    filters = {
        "gopher": GopherQualityFilter(),
        "gopher_repetition": GopherRepetitionFilter(),
        "c4": C4QualityFilter(),
        "fineweb": FineWebQualityFilter(),
    }
    split_into_words("The tokenizer is loaded.")
    result = {}
    for name, step in filters.items():
        documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
        start = time.process_time()
        reasons = [rejection_reason(step.filter(document)) for document in documents]
        seconds = time.process_time() - start
        result[name] = {"seconds": seconds, "reasons": reasons, "texts": [document.text for document in documents]}
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    start = time.process_time()
    for document in documents:
        for step in filters.values():
            step.filter(document)
    result["all"] = {"seconds": time.process_time() - start}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
