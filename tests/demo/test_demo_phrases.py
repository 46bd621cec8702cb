"""Phrases expand to exactly their alternatives."""

import numpy as np
import pytest

from posttrain.demo.phrases import parse_phrase


def _expansions(line: str) -> set[str]:
    phrase, rng = parse_phrase(line), np.random.default_rng(0)
    return {phrase.expand(rng) for _ in range(500)}


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("plain {slot} text", {"plain {slot} text"}),
        ("a [b|c] d", {"a b d", "a c d"}),
        ("[x|]y", {"xy", "y"}),
        ("[a[1|2]|b][!|?]", {"a1!", "a1?", "a2!", "a2?", "b!", "b?"}),
    ],
)
def test_every_alternative_is_reached_and_counted(line: str, texts: set[str]) -> None:
    assert _expansions(line) == texts
    assert parse_phrase(line).count() == len(texts)


def test_texts_lists_each_literal_piece() -> None:
    assert parse_phrase("a [b|c[d|{e}]]").texts() == ["a ", "b", "c", "d", "{e}"]


@pytest.mark.parametrize("line", ["a [b|c", "a | b", "a] b", "[a|[b]"])
def test_unbalanced_brackets_raise(line: str) -> None:
    with pytest.raises(ValueError, match="bracket"):
        parse_phrase(line)
