"""Records that are too short or too long."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from pydantic import Field as Setting

from posttrain.data.records.normalise import input_texts
from posttrain.data.steps.bounds import Bound, judge
from posttrain.data.steps.step import Outcome, RowStep
from posttrain.store.section import Section


class Lengths(Section):
    """Bounds on one part of a record; what is not set bounds nothing."""

    min_characters: int | None = Setting(None, ge=0, description="fewest characters (code points)")
    max_characters: int | None = Setting(None, ge=0, description="most characters (code points)")
    min_words: int | None = Setting(None, ge=0, description="fewest words; whitespace parts them")
    max_words: int | None = Setting(None, ge=0, description="most words; whitespace parts them")


class Length(RowStep):
    """Inputs and answers keep to bounds on their characters and words; without settings all pass.

    The input is a record's text, or its turns but for the system's. Of a preference pair both answers must keep to
    the bounds; a record without an answer breaks none of the answer's. Facts: characters and words of the input and
    of the (better) answer.
    """

    name: ClassVar[str] = "length"
    input: Lengths = Setting(Lengths(), description="bounds on the prompt or text")
    answer: Lengths = Setting(Lengths(), description="bounds on each answer")

    def apply(self, table: pa.Table) -> Outcome:
        inputs = pa.array(input_texts(table), pa.large_string())
        measures, bounds = {}, []
        for name, texts, lengths in (
            ("input", inputs, self.input),
            ("answer", table["completion"], self.answer),
            ("worse_answer", table["rejected"], self.answer),
        ):
            measures[f"{name}_characters"] = _characters(texts)
            measures[f"{name}_words"] = _words(texts)
            what = name.replace("_", " ")
            bounds += [
                Bound(f"{what} too short", f"{name}_characters", "at least", lengths.min_characters),
                Bound(f"{what} too long", f"{name}_characters", "at most", lengths.max_characters),
                Bound(f"{what} too short", f"{name}_words", "at least", lengths.min_words),
                Bound(f"{what} too long", f"{name}_words", "at most", lengths.max_words),
            ]
        outcome = judge(table, self.name, measures, bounds)
        told = {name: values for name, values in outcome.facts.items() if not name.startswith("worse")}
        return outcome._replace(facts=told)


def _characters(texts: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.float64]:
    lengths = pa.compute.cast(pa.compute.utf8_length(texts), pa.float64())
    return np.asarray(lengths.to_numpy(zero_copy_only=False), dtype=np.float64)


def _words(texts: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.float64]:
    counts = [np.nan if text is None else len(text.split()) for text in texts.to_pylist()]
    return np.array(counts, dtype=np.float64)
