"""Shards of a version, read together as one table."""

from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from posttrain.data.records.record import records
from posttrain.data.versions.shards import RECORDS, Shard, ShardCorpus
from posttrain.jobs.map import InlineEngine


@pytest.mark.parametrize("rows", [[], [5, 0, 3, 5, 1], [4, 3, 2, 1, 0]])
def test_rows_come_in_the_order_in_which_they_are_asked_for(tmp_path: Path, rows: list[int]) -> None:
    shards = []
    for number, count in enumerate((2, 1, 3)):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        table = records([{"id": f"{number}-{row}", "text": "x"} for row in range(count)])
        parquet.write_table(table, folder / RECORDS)
        shards.append(Shard(folder, f"{number}", count, [], None, {}))
    corpus = ShardCorpus(shards, 0, np.ones(6, bool), InlineEngine())
    ids = ["0-0", "0-1", "1-0", "2-0", "2-1", "2-2"]
    assert corpus.take(np.array(rows, np.int64))["id"].to_pylist() == [ids[row] for row in rows]
    assert corpus.columns(["id"])["id"].to_pylist() == ids
