"""Sizes and caps of classes, and how a mix weighs them."""

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.balance import Balance
from posttrain.data.steps.step import DataStep
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, reasons, table_of
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import PhaseConfig


def classes(**sizes: int) -> pa.Table:
    return table_of(
        "plain text",
        *({"prompt": f"{label} {n}", "completion": label} for label, size in sizes.items() for n in range(size)),
    )


class TestBalance(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Balance(mode="downsample", ratio=2)

    @pytest.fixture
    def table(self) -> pa.Table:
        return classes(a=7, b=2, c=4)

    def test_a_class_keeps_its_cap_of_records(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert sorted(outcome.kept["completion"].to_pylist()[1:]) == ["a"] * 4 + ["b"] * 2 + ["c"] * 4
        assert outcome.kept["text"][0].as_py() == "plain text"
        assert set(reasons(outcome).values()) == {"majority class"}
        assert set(outcome.rejected["detail"].to_pylist()) == {"`a`: 4 of 7 records stay"}

    def test_a_larger_cap_keeps_all_records_of_a_smaller_cap(self) -> None:
        table = classes(a=60, b=4)
        kept_lines = [
            set(lines(apply_step(Balance(mode="downsample", ratio=ratio), table).kept)) for ratio in (1, 2.5, 5, 20)
        ]
        assert [len(item) for item in kept_lines] == [9, 15, 25, 65]
        assert kept_lines[0] < kept_lines[1] < kept_lines[2] < kept_lines[3]
        grown_table = pa.concat_tables([table, classes(b=8).slice(5)])
        assert kept_lines[0] <= set(lines(apply_step(Balance(mode="downsample", ratio=1), grown_table).kept))

    def test_by_default_it_only_reports(self, table: pa.Table) -> None:
        outcome = apply_step(Balance(), table)
        assert outcome.kept.equals(table)
        assert outcome.facts["class_size"].to_pylist() == [None] + [7.0] * 7 + [2.0] * 2 + [4.0] * 4
        by_source = apply_step(Balance(by="source"), table)
        assert by_source.facts["class_size"].to_pylist() == [14.0] * 14

    @pytest.mark.parametrize(("temperature", "power"), [(2.0, -0.5), (1e9, -1.0)])
    def test_a_mix_by_answer_weighs_a_class_by_a_power_of_its_size(self, temperature: float, power: float) -> None:
        """The count of a record in an epoch is proportional to a power of the size of its class."""
        sizes = {"a": 6400, "b": 100, "c": 900}
        answers = np.repeat(list(sizes), list(sizes.values()))
        phase = PhaseConfig(mix="sizes", mix_by="completion", mix_temperature=temperature, epochs=1)
        sampler = BatchSampler(len(answers), 10, 0, [phase], kinds={"completion": answers.tolist()})
        counts = sampler.seen()
        for label in sizes:
            expected = sizes[label] ** power / sum(n ** (power + 1) for n in sizes.values()) * len(answers)
            assert counts[answers == label].sum() == pytest.approx(expected * sizes[label], abs=1)

    def test_an_unknown_mode_raises(self) -> None:
        with pytest.raises(UserError, match="mode"):
            Balance.read({"mode": "weight"}, "balance")
