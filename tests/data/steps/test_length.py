"""Bounds on inputs and answers."""

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.step import DataStep
from posttrain.data.steps.validity import Length, Lengths
from posttrain.testing.steps import StepContract, reasons, table_of


class TestLength(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Length(input=Lengths(min_characters=3, max_words=3), answer=Lengths(min_words=2, max_characters=5))

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            "äöü",
            "äö",
            "a b c",
            "a b c d",
            {"prompt": "abc", "completion": "a b"},
            {"prompt": "abc", "completion": "ab"},
            {"prompt": "abc", "completion": "ab cd"},
            {"prompt": "abc", "completion": "ab cde"},
            {"prompt": "abc", "completion": "a b", "rejected": "a"},
            {"prompt": "abc", "completion": "a b", "rejected": "ab cde"},
            {"prompt": "abc"},
            {"prompt": [{"role": "system", "content": "a b c d"}, {"role": "user", "content": "x\ny"}]},
        )

    def test_each_bound(self, step: DataStep, table: pa.Table) -> None:
        assert reasons(apply_step(step, table)) == {
            2: "input too short",
            4: "input too long",
            6: "answer too short",
            8: "answer too long",
            9: "worse answer too short",
            10: "worse answer too long",
        }

    def test_detail_score_and_facts(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert outcome.rejected.to_pylist()[0]["detail"] == "input characters 2, must be at least 3"
        assert outcome.rejected.to_pylist()[0]["score"] == 2
        facts = {name: values.to_pylist() for name, values in outcome.facts.items()}
        assert facts["input_characters"] == [3, 2, 5, 7, 3, 3, 3, 3, 3, 3, 3, 3]
        assert facts["input_words"][-1] == 2
        assert facts["answer_words"][:8] == [None] * 4 + [2, 1, 2, 2]
        assert set(facts) == {"input_characters", "input_words", "answer_characters", "answer_words"}

    def test_without_settings_all_pass(self, table: pa.Table) -> None:
        assert apply_step(Length(), table).kept.equals(table)
