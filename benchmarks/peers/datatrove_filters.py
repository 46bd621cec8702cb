"""datatrove's filters with their defaults: run by ``filters.py`` in datatrove's own environment.

    python datatrove_filters.py TEXTS own|spaces

TEXTS is a JSON list. ``own`` words are those of its tokenizer for English, ``spaces`` those that whitespace parts.
Prints for each filter the processor seconds and, for each text, null or the reason why it goes, and for the filter that
changes texts what becomes of them; then the seconds of all four filters over one text after the other.
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


def decided(found: bool | tuple[bool, str]) -> str | None:
    return found[1] if isinstance(found, tuple) else None if found else "rejected"


def main(texts: str, words: str) -> None:
    given = json.loads(Path(texts).read_text(encoding="utf-8"))
    if words == "spaces":
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
        documents = [Document(text=text, id=str(number)) for number, text in enumerate(given)]
        start = time.process_time()
        reasons = [decided(step.filter(document)) for document in documents]
        seconds = time.process_time() - start
        result[name] = {"seconds": seconds, "reasons": reasons, "texts": [document.text for document in documents]}
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(given)]
    start = time.process_time()
    for document in documents:
        for step in filters.values():
            step.filter(document)
    result["all"] = {"seconds": time.process_time() - start}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
