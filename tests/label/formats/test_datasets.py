"""The folder for Hugging Face's ``datasets``: its layout, and the shapes of its records.

`datasets` 5.2 read such folders of every kind when this was written; the layout is that of its documentation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import yaml
from format_batches import KINDS, fill

from posttrain.label.formats.datasets import SHAPES
from posttrain.label.formats.exporter import DATASETS, export_queue
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.store.errors import UserError

NewQueue = Callable[..., Queue]

_SHAPES_OF = {
    **{kind: {"sft"} for kind in ("choice", "choices", "text", "spans", "conversation")},
    "rewrite": {"sft", "preference"},
    "rating": {"kto"},
    **{kind: {"preference"} for kind in ("preference", "ranking")},
}


def rows(folder: Path, shape: str) -> list[dict[str, Any]]:
    path = folder / shape / "train.parquet"
    assert parquet.read_schema(path).equals(SHAPES[shape])
    return parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_shapes(kind: str, new_queue: NewQueue, tmp_path: Path) -> None:
    queue, folder = new_queue(), tmp_path / "set"
    fill(queue, kind)
    count = export_queue(queue, "batch", folder, DATASETS)
    head = (folder / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    configs = {config["config_name"]: config["data_files"] for config in yaml.safe_load(head)["configs"]}
    assert set(configs) == _SHAPES_OF[kind]
    assert configs == {shape: [{"split": "train", "path": f"{shape}/train.parquet"}] for shape in configs}
    records = {shape: rows(folder, shape) for shape in configs}
    assert sum(map(len, records.values())) == count
    # No gold item, no dropped one, and none that is not decided.
    assert {row["id"] for each in records.values() for row in each} <= {"r0", "r1", "r3"}
    assert {(row["id"], *row["annotators"]) for row in records[min(records)]} >= {("r0", "ana")}


def test_records_to_train_on(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    prompt = [{"role": "user", "content": "Hi"}]
    queue.add_batch("good", "rewrite", [NewItem("r", {"prompt": prompt, "answer": "bad", "meta": {"lang": "en"}})])
    queue.add_batch("rated", "rating", [NewItem(str(n), {"text": "Hi", "answer": "ok"}) for n in range(3)])
    queue.answer(queue.items("good")[0].id, "ana", "good")
    for item, rating in zip(queue.items("rated"), (1, 3, 5), strict=True):
        queue.answer(item.id, "ana", rating)
    export_queue(queue, "good", tmp_path / "good", DATASETS)
    export_queue(queue, "rated", tmp_path / "rated", DATASETS)
    answer = [{"role": "assistant", "content": "good"}]
    origin = {"id": "r", "annotators": ["ana"], "decided": "single", "meta": '{"lang": "en"}'}
    assert rows(tmp_path / "good", "sft") == [{"messages": prompt + answer, **origin}]
    (pair,) = rows(tmp_path / "good", "preference")
    assert (pair["prompt"], pair["chosen"]) == (prompt, answer)
    assert pair["rejected"] == [{"role": "assistant", "content": "bad"}]
    assert [(row["id"], row["label"]) for row in rows(tmp_path / "rated", "kto")] == [("0", False), ("2", True)]


def test_a_batch_without_answers_writes_nothing(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue()
    queue.add_batch("batch", "choice", [NewItem("r", {"text": "x"})], labels=["a"])
    with pytest.raises(UserError, match="no item of the batch `batch` has an answer to learn from yet"):
        export_queue(queue, "batch", tmp_path / "set", DATASETS)
    (tmp_path / "set").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export_queue(queue, "batch", tmp_path / "set", DATASETS)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["set"]
    assert list((tmp_path / "set").iterdir()) == []
