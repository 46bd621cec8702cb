"""Words of a text in the place of others."""

import re
from collections.abc import Sequence


def replace(text: str, places: Sequence[re.Match[str]], words: Sequence[str]) -> str:
    """``text`` with each of the words in the place of one match; the matches are in order and apart."""
    parts, end = [], 0
    for place, word in zip(places, words, strict=True):
        parts += [text[end : place.start()], word]
        end = place.end()
    return "".join([*parts, text[end:]])
