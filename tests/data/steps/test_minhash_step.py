"""Records with nearly equal inputs."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.steps.apply import TableCorpus, apply_step
from posttrain.data.steps.duplicates import Minhash
from posttrain.data.steps.step import DataStep
from posttrain.testing.steps import StepContract, lines, table_of

TEXT = "please tell me where my parcel is right now because i have been waiting for it"


class CorpusWithDeadRow(TableCorpus):
    """A corpus whose first row an earlier step has rejected."""

    @property
    def alive(self) -> np.ndarray:  # type: ignore[override]
        return np.arange(self.rows) > 0


class ThreadedCorpus(TableCorpus):
    """A corpus with its own workers; it pickles every function that it sends to them."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        import pickle

        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(pickle.loads(pickle.dumps(function)), items)  # noqa: S301


class TestMinhash(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Minhash()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            {"prompt": TEXT, "completion": "a"},
            {"prompt": TEXT + ".", "completion": "b"},
            {"prompt": TEXT.upper() + "!", "completion": "a"},
            {"prompt": "something else entirely", "completion": "a"},
            {"prompt": TEXT, "completion": "a", "rejected": "b"},
            {"prompt": TEXT + "?", "completion": "b"},
            TEXT + " now",
        )

    def test_the_first_of_each_answer_stays(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert lines(outcome.kept) == [1, 2, 4, 5, 7]
        ids = table["id"].to_pylist()
        num_shared = len(TEXT) - 4
        score = num_shared / (num_shared + 1)
        rejected_rows = outcome.rejected.to_pylist()
        assert [(row["line"], row["detail"], row["cluster"], row["kept"]) for row in rejected_rows] == [
            (3, f"similarity {score:.2f} to f:1", ids[0], ids[0]),
            (6, f"similarity {num_shared / (num_shared + 2):.2f} to f:2", ids[0], ids[1]),
        ]
        assert {row["reason"] for row in rejected_rows} == {"near duplicate"}
        assert [row["score"] for row in rejected_rows] == [score, num_shared / (num_shared + 2)]

    def test_records_linked_through_others_form_one_cluster(self) -> None:
        words = [f"word{number:03d}" for number in range(60)]
        texts = [" ".join(words[start : start + 40]) for start in (0, 3, 6)]
        rejected_rows = apply_step(Minhash(), table_of(*texts)).rejected.to_pylist()
        assert [row["line"] for row in rejected_rows] == [2, 3]
        assert rejected_rows[0]["score"] >= 0.8 > rejected_rows[1]["score"]
        assert (
            rejected_rows[1]["detail"]
            == f"similarity {rejected_rows[1]['score']:.2f} to f:1; linked through other records"
        )

    def test_equal_inputs_and_empty_ones(self) -> None:
        rows = [{"prompt": "", "completion": "a"}, {"prompt": "B ", "completion": "a"}, {}, {}]
        outcome = apply_step(Minhash(), table_of(*rows, {"prompt": " b", "completion": "a"}))
        assert lines(outcome.kept) == [1, 2, 3]
        assert outcome.rejected["score"].to_pylist() == [1.0, 1.0]

    def test_dead_rows_are_ignored(self, table: pa.Table) -> None:
        step = Minhash()
        decision = step.decide(CorpusWithDeadRow(table, step))
        assert {row: rejection.kept for row, rejection in decision.rejections.items()} == {5: table["id"][1].as_py()}
        assert decision.rejections[5].cluster == table["id"][1].as_py()

    def test_workers_change_nothing(self, table: pa.Table) -> None:
        step = Minhash()
        assert step.decide(ThreadedCorpus(table, step)) == step.decide(TableCorpus(table, step))
