"""The quality rules of MassiveWeb."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field as Setting

from posttrain.data.records.normalise import Field, texts_of
from posttrain.data.steps.bounds import Bound, Measures, judge, share
from posttrain.data.steps.step import Outcome, RowStep

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")

_BULLETS = ("•", "‣", "◦", "▪", "●", "-", "–", "*")
_ELLIPSES = ("...", "…")


class Gopher(RowStep):
    """Web pages that read like prose stay.

    The rules and thresholds are those of Rae et al., "Scaling Language Models: Methods, Analysis & Insights from
    Training Gopher" (2021, arXiv:2112.11446), appendix A1.1, "quality filtering". They are meant for pages of English
    web text: nearly every chat message has fewer than 50 words and goes. Words are what whitespace parts, so languages
    that are written without spaces break the rules, too. Lines without a word are not counted; which characters are
    bullets the paper leaves open. A record that lacks what is read, such as an answer, stays.
    """

    name: ClassVar[str] = "gopher"
    field: Field = Setting("all", description="which words of a record are read: input, answer or all")
    min_words: int | None = Setting(50, ge=0, description="fewest words")
    max_words: int | None = Setting(100_000, ge=0, description="most words")
    min_mean_word_length: float | None = Setting(3, ge=0, description="lowest mean length of a word, in characters")
    max_mean_word_length: float | None = Setting(10, ge=0, description="highest mean length of a word, in characters")
    max_symbols_per_word: float | None = Setting(
        0.1, ge=0, description="most hash signs, and most ellipses, for each word"
    )
    max_bullet_lines: float | None = Setting(
        0.9, ge=0, le=1, description="largest share of lines that begin with a bullet"
    )
    max_ellipsis_lines: float | None = Setting(
        0.3, ge=0, le=1, description="largest share of lines that end with an ellipsis"
    )
    min_alphabetic_words: float | None = Setting(
        0.8, ge=0, le=1, description="smallest share of words with a letter in them"
    )
    min_stop_words: int | None = Setting(2, ge=0, description="fewest different stop words")
    stop_words: tuple[str, ...] = Setting(
        STOP_WORDS, description="words, in lower case, that all prose of a language has"
    )

    def apply(self, table: pa.Table) -> Outcome:
        measures = _measures(texts_of(table, self.field), frozenset(self.stop_words))
        return judge(
            table,
            self.name,
            measures,
            [
                Bound("too few words", "words", "at least", self.min_words),
                Bound("too many words", "words", "at most", self.max_words),
                Bound("short words", "mean_word_length", "at least", self.min_mean_word_length),
                Bound("long words", "mean_word_length", "at most", self.max_mean_word_length),
                Bound("many hash signs", "hashes_per_word", "at most", self.max_symbols_per_word),
                Bound("many ellipses", "ellipses_per_word", "at most", self.max_symbols_per_word),
                Bound("bulleted lines", "bullet_lines", "at most", self.max_bullet_lines),
                Bound("lines that break off", "ellipsis_lines", "at most", self.max_ellipsis_lines),
                Bound("few words with letters", "alphabetic_words", "at least", self.min_alphabetic_words),
                Bound("few stop words", "stop_words", "at least", self.min_stop_words),
            ],
        )


def _measures(texts: Sequence[str], stop_words: frozenset[str]) -> Measures:
    counts = np.array([_counts(text, stop_words) for text in texts], dtype=np.float64).reshape(-1, 9)
    counts[[not text for text in texts]] = np.nan  # nothing was said that could be judged
    words, characters, hashes, ellipses, alphabetic, stops, lines, bullets, endings = counts.T
    return {
        "words": words,
        "mean_word_length": share(characters, words),
        "hashes_per_word": share(hashes, words),
        "ellipses_per_word": share(ellipses, words),
        "bullet_lines": share(bullets, lines),
        "ellipsis_lines": share(endings, lines),
        "alphabetic_words": share(alphabetic, words),
        "stop_words": stops,
    }


def _counts(text: str, stop_words: frozenset[str]) -> tuple[int, ...]:
    words = text.split()
    # Most words are letters alone, which is asked of the whole word at once.
    others = [word for word in words if not word.isalpha()]
    alphabetic = len(words) - len(others) + sum(any(map(str.isalpha, word)) for word in others)
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    return (
        len(words),
        sum(map(len, words)),
        text.count("#"),
        text.count("...") + text.count("…"),
        alphabetic,
        len(stop_words.intersection(text.lower().split())),
        len(lines),
        sum(line.startswith(_BULLETS) for line in lines),
        sum(line.endswith(_ELLIPSES) for line in lines),
    )
