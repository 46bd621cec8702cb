"""The texts of RECORD tables as Arrow columns, without a Python object a turn."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def input_column(table: pa.Table) -> pa.Array:
    """What `posttrain.data.records.normalise.input_texts` gives, as a string array [N]; null for a record without
    input."""
    prompt = table["prompt"].combine_chunks()
    turns = prompt.flatten()
    owners = np.repeat(np.arange(len(prompt)), pc.fill_null(pc.list_value_length(prompt), 0).to_numpy())
    shown = pc.fill_null(pc.not_equal(turns.field("role"), "system"), True)
    counts = np.bincount(owners[shown.to_numpy(zero_copy_only=False)], minlength=len(prompt))
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    contents = pc.fill_null(turns.field("content").filter(shown), "")
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, contents), "\n")
    return pc.if_else(prompt.is_valid(), joined, table["text"].combine_chunks())


def text_parts(table: pa.Table) -> dict[str, pa.Array]:
    """A string array [N] for each part of a record that has a text, null where a record lacks it."""
    parts = {
        "input": input_column(table),
        "answer": table["completion"].combine_chunks(),
        "worse answer": table["rejected"].combine_chunks(),
    }
    return {name: texts for name, texts in parts.items() if texts.null_count < len(texts)}
