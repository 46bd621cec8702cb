"""Texts as words alone, for comparisons in which case and punctuation say nothing."""

import re
from collections.abc import Iterable

from posttrain.data.records.normalise import almost_ascii, comparable

_ASCII = bytes(ord(chr(code).lower()) if chr(code).isalnum() else ord(" ") for code in range(128)) + b" " * 128
_NO_WORD = re.compile(r"[\W_]+")
_WITHOUT_SPACES = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")


def plain_words(texts: Iterable[str]) -> list[str]:
    """Each text as its letters and digits in lower case, everything else a space, as GPT-3's overlaps were counted
    (Brown et al. 2020, arXiv:2005.14165, appendix C). Chinese and Japanese characters are words of their own."""
    return [_plain(text) for text in texts]


def _plain(text: str) -> str:
    if almost_ascii(text):
        return text.encode("ascii", "replace").translate(_ASCII).decode("ascii")
    return _NO_WORD.sub(" ", _WITHOUT_SPACES.sub(r" \1 ", comparable(text)))
