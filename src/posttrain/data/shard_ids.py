"""One id of the user's is one content, over all pieces of a file."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.data.shard import USER_IDS, Shard
from posttrain.store.errors import UserError


def check_user_ids(shards: Sequence[Shard]) -> None:
    """Refuse a file in which one id stands for two contents; of one piece its reading has done so already.

    Raises:
        UserError: with file and line of the later record, and the line of the earlier one.
    """
    for name, group in groupby(shards, key=lambda shard: str(shard.piece["name"])):
        files = [shard.folder / USER_IDS for shard in group]
        tables = [parquet.read_table(file) for file in files if file.exists()]
        if len(tables) > 1:
            _check(name, pa.concat_tables(tables))


def _check(name: str, ids: pa.Table) -> None:
    keys, contents = (ids[column].combine_chunks().cast(pa.binary()).to_numpy(False) for column in ("key", "content"))
    keys, contents = keys.astype("S12"), contents.astype("S10")
    lines = ids["line"].to_numpy()
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    other = first[inverse]
    wrong = np.flatnonzero(contents != contents[other])
    if len(wrong):
        row = wrong[np.argmin(lines[wrong])]
        message = f"its id stands on line {lines[other[row]]} too, with other content"
        raise UserError(message, where=f"{name}:{lines[row]}", fix="give every record an id of its own")
