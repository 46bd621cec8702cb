"""The table of answers that the quality measures read: one row for each answer of each annotator."""

import pyarrow as pa

ANSWERS = pa.schema(
    [
        # Id of the item; several annotators may answer one.
        pa.field("item", pa.int64(), nullable=False),
        pa.field("record", pa.string(), nullable=False),
        pa.field("batch", pa.string(), nullable=False),
        pa.field("annotator", pa.string(), nullable=False),
        # A label of the closed set, or an open-ended answer as canonical JSON.
        pa.field("answer", pa.string(), nullable=False),
        # The right answer of a gold item; null for the others.
        pa.field("expected", pa.string()),
        # The item's final answer, and how it was reached; null while it is open.
        pa.field("resolution", pa.string()),
        pa.field("resolved_by", pa.string()),
        # The suggestion as this annotator saw it, and whether it was a planted wrong one.
        pa.field("suggestion", pa.string()),
        pa.field("planted", pa.bool_(), nullable=False),
        # Index of the answer in the order of the labels shown.
        pa.field("position", pa.int64()),
        pa.field("seconds", pa.float64()),
        pa.field("confidence", pa.float64()),
        pa.field("checked", pa.bool_(), nullable=False),
        pa.field("guideline", pa.int64(), nullable=False),
        pa.field("created_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""Rows are in the order in which the answers were given. Skipped and undone answers are not among them."""
