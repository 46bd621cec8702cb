"""Records that contradict each other."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute

from posttrain.data.steps.step import Corpus, Decision, GlobalStep, Rejection, places


class Conflicts(GlobalStep):
    """Of records with equal inputs and different answers none stays: no one can say which answer is true.

    Left out where there is no closed label set: one input may then well have several good answers.
    Preference pairs and records without an answer pass.
    """

    name: ClassVar[str] = "conflicts"
    evaluation: ClassVar[bool] = True
    needs_answers: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    def sketch(self, table: pa.Table) -> pa.Table:
        answered = pa.compute.and_(pa.compute.is_valid(table["completion"]), pa.compute.is_null(table["rejected"]))
        return table.select(["id", "input_id"]).append_column("answered", answered)

    def decide(self, corpus: Corpus) -> Decision:
        sketches = corpus.sketches()
        rows = np.flatnonzero(corpus.alive & sketches["answered"].to_numpy())
        inputs = np.asarray(sketches["input_id"].to_numpy(), dtype="S20")[rows]
        ids = np.asarray(sketches["id"].to_numpy(), dtype="S20")[rows]
        distinct = np.unique(np.stack([inputs, ids]), axis=1)[0]
        names, counts = np.unique(distinct, return_counts=True)
        disputed = rows[np.isin(inputs, names[counts > 1])]
        records = corpus.take(disputed)
        told = [
            (identity, f"`{answer}` at {where}")
            for identity, answer, where in zip(
                records["input_id"].to_pylist(), records["completion"].to_pylist(), places(records), strict=True
            )
        ]
        details: dict[str, list[str]] = {}
        for identity, text in told:
            details.setdefault(identity, []).append(text)
        return Decision(
            {
                row: Rejection("conflicting labels", "; ".join(details[identity]))
                for row, (identity, _) in zip(disputed.tolist(), told, strict=True)
            }
        )
