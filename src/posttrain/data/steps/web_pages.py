"""Filters web pages by the quality rules of C4 and of FineWeb."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from posttrain.data.quality.repetition import repeated_shares
from posttrain.data.records.outcome import Outcome, Rejection, reject_rows, rewrite
from posttrain.data.records.record import TextField, first_empty, joined_texts, map_texts, record_texts
from posttrain.data.steps.bounds import Bound, Measures, apply_bounds, ratio
from posttrain.data.steps.step import RowStep

POLICY_PHRASES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")

_SENTENCE_ENDS = (".", "!", "?", '"', "”")

_ELLIPSES = ("...", "…")

_MIN_WORDS_PER_LINE = 3

_MAX_WORD_LENGTH = 1000  # that of the program that made the corpus

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")

# Possessive: without backtracking a line of a million full stops takes linear time.
_SENTENCE = re.compile(r"(?<![.!?])[.!?]++[\"”'’)\]]*+(?=\s|\Z)")

_SHORT_LINE = 30

_LINE_ENDS = tuple(".!?。．！？｡؟۔।॥።՞։…‽⁇⁈⁉\"'”’»」』)")


class C4(RowStep):
    """Keeps the lines of web pages that are sentences, and rejects pages with too few sentences.

    The rules are those of Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (JMLR 21(140), 2020, arXiv:1910.10683), section 2.2: a line is kept if it ends in a terminal
    punctuation mark and has at least 3 words; lines that name Javascript, lines about policies
    and marks of citation are removed; a page is rejected if it contains "lorem ipsum" or a curly bracket, or if fewer
    than ``min_sentences`` sentences are left. The longest word and the phrases about policies are those of the program
    that made the corpus, whose minima are 3 sentences and 5 words. Sentences are counted by their ends, so an
    abbreviation within a line counts too. Other steps filter by bad words and language, and remove repeated spans.

    Meant for English web text: it rejects nearly every chat message, and code loses its lines. The texts of a record
    together are one page; the record is rejected if one of them loses all its lines. System turns stay unchanged.
    """

    name: ClassVar[str] = "c4"
    field: TextField = Field("input", description="Text of a record that is the page: the input, the answer, or all.")
    terminal_punctuation: bool = Field(True, description="Remove lines that do not end like a sentence.")
    min_sentences: int = Field(5, ge=0, description="Fewest sentences of a page.")
    curly_brackets: bool = Field(True, description="Reject pages with a curly bracket.")

    def apply(self, table: pa.Table) -> Outcome:
        pages = joined_texts(table, self.field)
        columns = table.select(["prompt", "completion", "rejected", "text"]).to_pylist()
        rejections: dict[int, Rejection] = {}
        values: dict[int, dict[str, Any]] = {}
        sentences: list[float | None] = []
        for row, (page, record) in enumerate(zip(pages, columns, strict=True)):
            if not page:
                sentences.append(None)
                continue
            new = map_texts(record, self._kept_lines, self.field, system=False)
            count = _count_sentences({**record, **new}, self.field)
            sentences.append(count)
            if rejection := self._rejection(page, count, first_empty(new)):
                rejections[row] = rejection
            elif new:
                values[row] = new
        facts = {"sentences": pa.array(sentences, pa.float64())}
        if not values:
            return reject_rows(table, self.name, rejections, facts)
        table, changed = rewrite(table, values, self.name, dict.fromkeys(values, "lines that are not sentences"))
        return reject_rows(table, self.name, rejections, facts)._replace(changed=changed)

    def _rejection(self, page: str, sentences: float, emptied: str | None) -> Rejection | None:
        if "lorem ipsum" in page.lower():
            return Rejection("lorem ipsum", "placeholder text")
        if self.curly_brackets and "{" in page:
            return Rejection("curly bracket", "looks like code", float(page.count("{")))
        if sentences < self.min_sentences:
            detail = f"sentences {sentences:.0f}, must be at least {self.min_sentences}"
            return Rejection("too few sentences", detail, sentences)
        return Rejection("no line left", f"the {emptied} loses all lines") if emptied else None

    def _kept_lines(self, text: str) -> str:
        stripped = (line.strip() for line in text.split("\n"))
        cited = (_CITATION.sub("", line).rstrip() for line in stripped)
        return "\n".join(line for line in cited if self._stays(line))

    def _stays(self, line: str) -> bool:
        words, lower = line.split(), line.lower()
        return not (
            len(words) < _MIN_WORDS_PER_LINE
            or (self.terminal_punctuation and (not line.endswith(_SENTENCE_ENDS) or line.endswith(_ELLIPSES)))
            or (len(line) > _MAX_WORD_LENGTH and max(map(len, words)) > _MAX_WORD_LENGTH)
            or "javascript" in lower
            or any(phrase in lower for phrase in POLICY_PHRASES)
        )


def _count_sentences(record: Mapping[str, Any], field: TextField) -> float:
    return float(sum(len(_SENTENCE.findall(text)) for text in record_texts(record, field, system=False)))


class Fineweb(RowStep):
    """Keeps web pages whose lines end like sentences, are not short and do not recur.

    The rules and thresholds are those of Penedo et al., "The FineWeb Datasets: Decanting the Web for the Finest Text
    Data at Scale" (2024, arXiv:2406.17557), section 3.6: a page goes whose share of lines that end in punctuation is
    0.12 or less, whose share of characters in recurring lines is 0.1 or more, or whose share of lines of up to 30
    characters is 0.67 or more. The bound on line ends for each word is not in the paper; it stands, with 0.3, in the
    pipeline that made the data set. All are meant for web text, not for chats. Lines without a word are not counted,
    and a quotation mark or bracket that closes counts as punctuation.
    """

    name: ClassVar[str] = "fineweb"
    field: TextField = Field("all", description="Text of a record to read: the input, the answer, or all.")
    min_punctuated_lines: float | None = Field(
        0.12, ge=0, le=1, description="The share of lines that end in punctuation must be above this."
    )
    max_short_lines: float | None = Field(0.67, ge=0, le=1, description="The share of short lines must be below this.")

    def apply(self, table: pa.Table) -> Outcome:
        return apply_bounds(
            table,
            self.name,
            _line_measures(joined_texts(table, self.field)),
            [
                Bound("lines without punctuation", "punctuated_lines", "more than", self.min_punctuated_lines),
                Bound("short lines", "short_lines", "less than", self.max_short_lines),
                Bound("repeated lines", "repeated_characters", "less than", 0.1),
                Bound("few words a line", "lines_per_word", "at most", 0.3),
            ],
        )


def _line_measures(texts: Sequence[str]) -> Measures:
    # Reshaped, because without texts the array would have no columns to take apart.
    counts = np.array([_line_counts(text) for text in texts], dtype=np.float64).reshape(-1, 6)
    lines, punctuated, short, repeated_characters, ends, words = counts.T
    return {
        "punctuated_lines": ratio(punctuated, lines),
        "short_lines": ratio(short, lines),
        "repeated_characters": repeated_characters,
        "lines_per_word": ratio(ends, words),
    }


def _line_counts(text: str) -> tuple[float, ...]:
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    return (
        len(lines),
        sum(line.endswith(_LINE_ENDS) for line in lines),
        sum(len(line) <= _SHORT_LINE for line in lines),
        repeated_shares(lines)[1],
        text.count("\n"),
        len(text.split()),
    )
