"""Records that give away the test set, as a step on tables that fit into memory."""

import pyarrow as pa

from posttrain.data.contamination import against
from posttrain.data.flow import Work
from posttrain.data.steps.step import Outcome, part


def leaks(test: pa.Table, threshold: float | None = 0.9) -> Work:
    """A step that takes out records with a test record's group, with its input, or with one like it.

    Args:
        threshold: Jaccard similarity of 5-character runs from which inputs are alike; None: only equal ones.
    """
    index = against(test, ngram=None, threshold=threshold, contained=None)

    def step(table: pa.Table) -> Outcome:
        return part(table, "leak", index.find(table))

    return step
