"""The quality rules of FineWeb."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field as Setting

from posttrain.data.quality.repetition import repeated
from posttrain.data.records.normalise import Field, texts_of
from posttrain.data.steps.bounds import Bound, Measures, judge, share
from posttrain.data.steps.step import Outcome, RowStep

_ENDS = tuple(".!?。．！？｡؟۔।॥።՞։…‽⁇⁈⁉\"'”’»」』)")


class Fineweb(RowStep):
    """Web pages whose lines end like sentences, are not short and do not recur stay.

    The rules and thresholds are those of Penedo et al., "The FineWeb Datasets: Decanting the Web for the Finest Text
    Data at Scale" (2024, arXiv:2406.17557), section 3.6: a page goes whose share of lines that end in punctuation is
    0.12 or less, whose share of characters in recurring lines is 0.1 or more, or whose share of lines of up to 30
    characters is 0.67 or more. The bound on line ends for each word is not in the paper; it stands, with 0.3, in the
    pipeline that made the data set. All are meant for web text, not for chats. Lines without a word are not counted,
    and a quotation mark or bracket that closes counts as punctuation.
    """

    name: ClassVar[str] = "fineweb"
    field: Field = Setting("all", description="which words of a record are read: input, answer or all")
    min_punctuated_lines: float | None = Setting(
        0.12, ge=0, le=1, description="the share of lines that end in punctuation must be above this"
    )
    max_repeated_characters: float | None = Setting(
        0.1, ge=0, le=1, description="the share of characters in lines that stood before must be below this"
    )
    max_short_lines: float | None = Setting(0.67, ge=0, le=1, description="the share of short lines must be below this")
    short_line: int = Setting(30, ge=0, description="characters up to which a line is short")
    max_lines_per_word: float | None = Setting(0.3, ge=0, description="most line ends for each word")

    def apply(self, table: pa.Table) -> Outcome:
        return judge(
            table,
            self.name,
            _measures(texts_of(table, self.field), self.short_line),
            [
                Bound("lines without punctuation", "punctuated_lines", "more than", self.min_punctuated_lines),
                Bound("short lines", "short_lines", "less than", self.max_short_lines),
                Bound("repeated lines", "repeated_characters", "less than", self.max_repeated_characters),
                Bound("few words a line", "lines_per_word", "at most", self.max_lines_per_word),
            ],
        )


def _measures(texts: Sequence[str], short_line: int) -> Measures:
    counts = np.array([_counts(text, short_line) for text in texts], dtype=np.float64).reshape(-1, 6)
    lines, punctuated, short, repeated_characters, ends, words = counts.T
    return {
        "punctuated_lines": share(punctuated, lines),
        "short_lines": share(short, lines),
        "repeated_characters": repeated_characters,
        "lines_per_word": share(ends, words),
    }


def _counts(text: str, short_line: int) -> tuple[float, ...]:
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    return (
        len(lines),
        sum(line.endswith(_ENDS) for line in lines),
        sum(len(line) <= short_line for line in lines),
        repeated(lines)[1],
        text.count("\n"),
        len(text.split()),
    )
