"""Sizes, weights and caps of classes."""

import numpy as np
import pyarrow as pa
import pytest
from step_contract import StepContract, lines, reasons, table_of

from posttrain.data.alone import apply
from posttrain.data.steps.balance import Balance
from posttrain.data.steps.step import Step


def classes(**sizes: int) -> pa.Table:
    return table_of(
        "plain text",
        *({"prompt": f"{label} {n}", "completion": label} for label, size in sizes.items() for n in range(size)),
    )


class TestBalance(StepContract):
    @pytest.fixture
    def step(self) -> Step:
        return Balance(mode="downsample", ratio=2)

    @pytest.fixture
    def table(self) -> pa.Table:
        return classes(a=7, b=2, c=4)

    def test_a_class_keeps_as_many_as_its_cap(self, step: Step, table: pa.Table) -> None:
        outcome = apply(step, table)
        assert sorted(outcome.kept["completion"].to_pylist()[1:]) == ["a"] * 4 + ["b"] * 2 + ["c"] * 4
        assert outcome.kept["text"][0].as_py() == "plain text"
        assert set(reasons(outcome).values()) == {"majority class"}
        assert set(outcome.rejected["detail"].to_pylist()) == {"`a`: 4 of 7 records stay"}

    def test_a_larger_cap_keeps_all_that_a_smaller_one_does(self) -> None:
        table = classes(a=60, b=4)
        kept = [set(lines(apply(Balance(mode="downsample", ratio=ratio), table).kept)) for ratio in (1, 2.5, 5, 20)]
        assert [len(one) for one in kept] == [9, 15, 25, 65]
        assert kept[0] < kept[1] < kept[2] < kept[3]
        grown = pa.concat_tables([table, classes(b=8).slice(5)])
        assert kept[0] <= set(lines(apply(Balance(mode="downsample", ratio=1), grown).kept))
        other = set(lines(apply(Balance(mode="downsample", ratio=2.5, seed=1), table).kept))
        assert other != kept[1]

    def test_it_reports_unless_told_otherwise(self, table: pa.Table) -> None:
        outcome = apply(Balance(), table)
        assert outcome.kept.equals(table)
        assert outcome.facts["class_size"].to_pylist() == [None] + [7.0] * 7 + [2.0] * 2 + [4.0] * 4
        by_source = apply(Balance(by="source"), table)
        assert by_source.facts["class_size"].to_pylist() == [14.0] * 14

    def test_weights_are_by_frequency_and_have_mean_one(self, table: pa.Table) -> None:
        sizes = np.array([7.0] * 7 + [2.0] * 2 + [4.0] * 4)
        inverse = np.array(apply(Balance(mode="weight", weighting="inverse"), table).facts["weight"].to_pylist()[1:])
        assert inverse == pytest.approx(13 / (3 * sizes))
        root = np.array(apply(Balance(mode="weight"), table).facts["weight"].to_pylist()[1:])
        assert root.mean() == pytest.approx(1)
        assert root * np.sqrt(sizes) == pytest.approx(root[0] * np.sqrt(7))
