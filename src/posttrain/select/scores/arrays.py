"""Matrices as columns of a table, and back."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def as_lists(rows: npt.NDArray[Any]) -> pa.FixedSizeListArray:
    """A matrix [N, D] as a column of lists of D float32 numbers."""
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel(), pa.float32()), rows.shape[1])


def as_matrix(table: pa.Table, name: str) -> npt.NDArray[np.float32]:
    """What `as_lists` made a column of: float32 [N, D]."""
    width = table.schema.field(name).type.list_size
    column = pa.concat_arrays(table[name].chunks) if table.num_rows else pa.array([], table.schema.field(name).type)
    values: npt.NDArray[np.float32] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    return values
