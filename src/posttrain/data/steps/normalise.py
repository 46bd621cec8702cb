"""Texts in one form of Unicode and whitespace."""

from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from pydantic import Field as Setting

from posttrain.data.records.clean_text import Form, Quotes, clean, suspect
from posttrain.data.records.contents import contents, emptied, revised
from posttrain.data.steps.rewrite import rewrite
from posttrain.data.steps.step import Outcome, Rejection, RowStep, part


class Normalise(RowStep):
    """Every text of a record, the system's turns as well, is kept as `posttrain.data.records.clean_text.clean` writes
    it.

    Records are told apart by their ids without regard to whitespace and canonical forms, so that only some of the
    records that are rewritten get a new id; those are noted as changed. What a model is measured on is written the
    same way. A record goes if a text of it holds nothing that anyone could see.
    """

    name: ClassVar[str] = "normalise"
    evaluation: ClassVar[bool] = True
    unicode: Form = Setting("nfc", description="Unicode normal form: nfc, nfkc, or keep what there is")
    quotes: Quotes = Setting("keep", description="keep quotation marks, or make curly ones straight")
    blank_lines: int = Setting(2, ge=0, description="how many blank lines stay of those that follow each other")

    def apply(self, table: pa.Table) -> Outcome:
        function = partial(clean, form=self.unicode, quotes=self.quotes, blank_lines=self.blank_lines)
        suspects = _suspects(table, suspect(self.unicode, self.quotes))
        texts = table.select(["prompt", "completion", "rejected", "text"]).take(pa.array(suspects)).to_pylist()
        values: dict[int, dict[str, Any]] = {}
        rejections: dict[int, Rejection] = {}
        for row, record in zip(suspects.tolist(), texts, strict=True):
            if new := revised(record, function):
                if name := emptied(new):
                    rejections[row] = Rejection("empty", f"the {name} holds nothing that can be seen")
                else:
                    values[row] = new
        if not values:
            return part(table, self.name, rejections)
        table, changed = rewrite(table, values, self.name, dict.fromkeys(values, "Unicode and whitespace"))
        return part(table, self.name, rejections)._replace(changed=changed)


def _suspects(table: pa.Table, pattern: str) -> npt.NDArray[np.int64]:
    """Rows with a text that may change, in order; a glance at the bytes is enough for most."""
    rows = [
        held.rows[pa.compute.match_substring_regex(held.texts, pattern).to_numpy(zero_copy_only=False)]
        for held in contents(table)
    ]
    return np.unique(np.concatenate(rows))
