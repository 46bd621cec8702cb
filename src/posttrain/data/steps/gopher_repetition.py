"""The repetition rules of MassiveWeb."""

import re
from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field as Setting
from pydantic import PositiveInt

from posttrain.data.quality.repetition import ngrams, repeated
from posttrain.data.records.normalise import Field, texts_of
from posttrain.data.steps.bounds import Bound, judge
from posttrain.data.steps.step import Outcome, RowStep

_PARAGRAPHS = re.compile(r"\n\s*\n")


class GopherRepetition(RowStep):
    """Texts that repeat their lines, paragraphs or runs of words go.

    The rules and thresholds are those of Rae et al., "Scaling Language Models: Methods, Analysis & Insights from
    Training Gopher" (2021, arXiv:2112.11446), appendix A1.1, table A1. What the paper leaves open: of lines and
    n-grams that recur, the first occurrence is no repetition; shares of characters are those of the words, without
    whitespace between them, or of the stripped lines; an n-gram that occurs once is not the most frequent one, so
    that a short text is not rejected for being short. Meant for web text, and short records seldom repeat themselves;
    a model's answers that go round in circles are found, too.
    """

    name: ClassVar[str] = "gopher_repetition"
    field: Field = Setting("all", description="which words of a record are read: input, answer or all")
    max_lines: float | None = Setting(0.30, ge=0, le=1, description="largest share of lines that stood before")
    max_paragraphs: float | None = Setting(
        0.30, ge=0, le=1, description="largest share of paragraphs that stood before"
    )
    max_line_characters: float | None = Setting(
        0.20, ge=0, le=1, description="largest share of characters in lines that stood before"
    )
    max_paragraph_characters: float | None = Setting(
        0.20, ge=0, le=1, description="largest share of characters in paragraphs that stood before"
    )
    max_top_ngram: dict[PositiveInt, float] = Setting(
        {2: 0.20, 3: 0.18, 4: 0.16},
        description="by n, largest share of characters in the most frequent n-gram",
    )
    max_repeated_ngrams: dict[PositiveInt, float] = Setting(
        {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
        description="by n, largest share of characters in n-grams of words that stood before",
    )

    def apply(self, table: pa.Table) -> Outcome:
        texts = texts_of(table, self.field)
        lines = np.array([repeated(_lines(text)) for text in texts], dtype=np.float64).reshape(-1, 2).T
        paragraphs = np.array([repeated(_paragraphs(text)) for text in texts], dtype=np.float64).reshape(-1, 2).T
        found = ngrams(texts, self.max_top_ngram, self.max_repeated_ngrams)
        measures = {
            "repeated_lines": lines[0],
            "repeated_paragraphs": paragraphs[0],
            "repeated_line_characters": lines[1],
            "repeated_paragraph_characters": paragraphs[1],
            **{f"top_{n}_gram": found.top[n] for n in sorted(found.top)},
            **{f"repeated_{n}_grams": found.repeated[n] for n in sorted(found.repeated)},
        }
        limits = {
            "repeated_lines": self.max_lines,
            "repeated_paragraphs": self.max_paragraphs,
            "repeated_line_characters": self.max_line_characters,
            "repeated_paragraph_characters": self.max_paragraph_characters,
            **{f"top_{n}_gram": limit for n, limit in sorted(self.max_top_ngram.items())},
            **{f"repeated_{n}_grams": limit for n, limit in sorted(self.max_repeated_ngrams.items())},
        }
        bounds = [Bound(name.replace("_", " "), name, "at most", limit) for name, limit in limits.items()]
        return judge(table, self.name, measures, bounds)


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.split("\n")) if line]


def _paragraphs(text: str) -> list[str]:
    if "\n" not in text:
        return [text.strip()] if text.strip() else []
    return [paragraph for paragraph in map(str.strip, _PARAGRAPHS.split(text)) if paragraph]
