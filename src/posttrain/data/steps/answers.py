"""Records that miss their answer."""

from typing import ClassVar

import pyarrow as pa
import pyarrow.compute

from posttrain.data.steps.step import Outcome, Rejection, RowStep, part


class Answers(RowStep):
    """Prompts without an answer go; plain text needs none."""

    name: ClassVar[str] = "answers"
    evaluation: ClassVar[bool] = True
    needs_answers: ClassVar[bool] = True

    def apply(self, table: pa.Table) -> Outcome:
        missing = pa.compute.and_(pa.compute.is_null(table["completion"]), pa.compute.is_null(table["text"]))
        rows = pa.compute.indices_nonzero(missing).to_pylist()
        return part(table, self.name, dict.fromkeys(rows, Rejection("no answer", "the answer is empty")))
