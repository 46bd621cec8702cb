"""Words of a text in any script: what stands between spaces, and each Chinese or Japanese character by itself.

Scripts that write words together without such characters, such as Thai, count as one word between spaces.
"""

import re

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUN = re.compile(rf"[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]+")
_PLAIN = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+(?:['’][^\W{_IDEOGRAPHS}]+)*")


def word_count(text: str) -> int:
    """How many words; punctuation belongs to the word that it touches."""
    return len(text.split()) if text.isascii() else len(_RUN.findall(text))


def shown_words(text: str) -> list[str]:
    """The words case-folded and without punctuation, but with apostrophes: people read them in n-grams."""
    return _PLAIN.findall(text.casefold())
