"""Filters web pages by the quality and repetition rules of Gopher's MassiveWeb."""

import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from posttrain.data.quality.repetition import ngram_shares, repeated_shares
from posttrain.data.records.outcome import Outcome
from posttrain.data.records.record import TextField, joined_texts
from posttrain.data.steps.bounds import Bound, Measures, apply_bounds, ratio
from posttrain.data.steps.step import RowStep

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")

_BULLETS = ("•", "‣", "◦", "▪", "●", "-", "–", "*")

_ELLIPSES = ("...", "…")

# Largest shares of characters: in the most frequent n-gram of words, and in n-grams that occur earlier, by n.
_MAX_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}

_MAX_REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}

_PARAGRAPHS = re.compile(r"\n\s*\n")


class Gopher(RowStep):
    """Keeps web pages that read like prose.

    The rules and thresholds are those of Rae et al., "Scaling Language Models: Methods, Analysis & Insights from
    Training Gopher" (2021, arXiv:2112.11446), appendix A1.1, "quality filtering". They are meant for pages of English
    web text: nearly every chat message has fewer than 50 words and is rejected. Words are split at whitespace, so
    languages that are written without spaces break the rules, too. Lines without a word are not counted; the paper
    leaves open which characters are bullets. A record without the text that is read, such as an answer, stays.
    """

    name: ClassVar[str] = "gopher"
    field: TextField = Field("all", description="Text of a record to read: the input, the answer, or all.")
    min_words: int | None = Field(50, ge=0, description="Fewest words.")
    max_words: int | None = Field(100_000, ge=0, description="Most words.")
    min_stop_words: int | None = Field(2, ge=0, description="Fewest different stop words.")
    stop_words: tuple[str, ...] = Field(
        STOP_WORDS, description="Words, in lower case, that all prose of a language has."
    )

    def apply(self, table: pa.Table) -> Outcome:
        measures = _word_measures(joined_texts(table, self.field), frozenset(self.stop_words))
        return apply_bounds(
            table,
            self.name,
            measures,
            [
                Bound("too few words", "words", "at least", self.min_words),
                Bound("too many words", "words", "at most", self.max_words),
                Bound("short words", "mean_word_length", "at least", 3),
                Bound("long words", "mean_word_length", "at most", 10),
                Bound("many hash signs", "hashes_per_word", "at most", 0.1),
                Bound("many ellipses", "ellipses_per_word", "at most", 0.1),
                Bound("bulleted lines", "bullet_lines", "at most", 0.9),
                Bound("lines that break off", "ellipsis_lines", "at most", 0.3),
                Bound("few words with letters", "alphabetic_words", "at least", 0.8),
                Bound("few stop words", "stop_words", "at least", self.min_stop_words),
            ],
        )


def _word_measures(texts: Sequence[str], stop_words: frozenset[str]) -> Measures:
    # Reshaped, because without texts the array would have no columns to take apart.
    counts = np.array([_word_counts(text, stop_words) for text in texts], dtype=np.float64).reshape(-1, 9)
    counts[[not text for text in texts]] = np.nan  # an empty text has no measures, so it breaks no bound
    words, characters, hashes, ellipses, alphabetic, stops, lines, bullets, endings = counts.T
    return {
        "words": words,
        "mean_word_length": ratio(characters, words),
        "hashes_per_word": ratio(hashes, words),
        "ellipses_per_word": ratio(ellipses, words),
        "bullet_lines": ratio(bullets, lines),
        "ellipsis_lines": ratio(endings, lines),
        "alphabetic_words": ratio(alphabetic, words),
        "stop_words": stops,
    }


def _word_counts(text: str, stop_words: frozenset[str]) -> tuple[int, ...]:
    words = text.split()
    # Most words are letters alone, which str.isalpha checks in one call.
    others = [word for word in words if not word.isalpha()]
    alphabetic = len(words) - len(others) + sum(any(map(str.isalpha, word)) for word in others)
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    return (
        len(words),
        sum(map(len, words)),
        text.count("#"),
        # The paper writes of ellipses; pages have them as three full stops as well as in one character.
        text.count("...") + text.count("…"),
        alphabetic,
        len(stop_words.intersection(text.lower().split())),
        len(lines),
        sum(line.startswith(_BULLETS) for line in lines),
        sum(line.endswith(_ELLIPSES) for line in lines),
    )


class GopherRepetition(RowStep):
    """Rejects texts that repeat their lines, paragraphs or runs of words.

    The rules and thresholds are those of Rae et al., "Scaling Language Models: Methods, Analysis & Insights from
    Training Gopher" (2021, arXiv:2112.11446), appendix A1.1, table A1. What the paper leaves open: of lines and
    n-grams that recur, the first occurrence is not repetition; shares of characters are those of the words, without
    whitespace between them, or of the stripped lines; an n-gram that occurs once is not the most frequent one, so
    that a short text is not rejected for being short. Meant for web text, and short records seldom repeat themselves;
    a model's answers that go round in circles are found, too.
    """

    name: ClassVar[str] = "gopher_repetition"
    field: TextField = Field("all", description="Text of a record to read: the input, the answer, or all.")

    def apply(self, table: pa.Table) -> Outcome:
        texts = joined_texts(table, self.field)
        lines = np.array([repeated_shares(_lines(text)) for text in texts], dtype=np.float64).reshape(-1, 2).T
        paragraphs = np.array([repeated_shares(_paragraphs(text)) for text in texts], dtype=np.float64).reshape(-1, 2).T
        shares = ngram_shares(texts, _MAX_TOP_NGRAM, _MAX_REPEATED_NGRAMS)
        measures = {
            "repeated_lines": lines[0],
            "repeated_paragraphs": paragraphs[0],
            "repeated_line_characters": lines[1],
            "repeated_paragraph_characters": paragraphs[1],
            **{f"top_{n}_gram": shares.top[n] for n in _MAX_TOP_NGRAM},
            **{f"repeated_{n}_grams": shares.repeated[n] for n in _MAX_REPEATED_NGRAMS},
        }
        limits = {
            "repeated_lines": 0.3,
            "repeated_paragraphs": 0.3,
            "repeated_line_characters": 0.2,
            "repeated_paragraph_characters": 0.2,
            **{f"top_{n}_gram": limit for n, limit in _MAX_TOP_NGRAM.items()},
            **{f"repeated_{n}_grams": limit for n, limit in _MAX_REPEATED_NGRAMS.items()},
        }
        bounds = [Bound(name.replace("_", " "), name, "at most", limit) for name, limit in limits.items()]
        return apply_bounds(table, self.name, measures, bounds)


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.split("\n")) if line]


def _paragraphs(text: str) -> list[str]:
    # Most chat messages are one line, which needs no regular expression.
    if "\n" not in text:
        return [text.strip()] if text.strip() else []
    return [paragraph for paragraph in map(str.strip, _PARAGRAPHS.split(text)) if paragraph]
