"""Types of arrays that several packages of `posttrain.data` pass to each other."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Matrix = npt.NDArray[np.float32]

Mask = npt.NDArray[np.bool_]

Indices = npt.NDArray[np.int64]

Hashes = npt.NDArray[np.uint64]

Splits = npt.NDArray[np.int8]
"""The split of each row by its index in `posttrain.data.split.SPLITS`; -1 for none."""
