"""All texts of a record are cleaned, and clean records do not change."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.normalise import Normalise
from posttrain.data.steps.step import DataStep
from posttrain.testing.steps import StepContract, lines, reasons, table_of

ROWS: tuple[dict[str, Any] | str, ...] = (
    "clean",
    "cafe\u0301 \r\n\r\nau\u00a0lait ",
    "\u200b\ufeff",
    {
        "prompt": [{"role": "system", "content": "be\u200b kind"}, {"role": "user", "content": "x\0"}],
        "completion": "y\u00ad",
        "rejected": "z\x1b",
    },
    {"prompt": "fine", "completion": "\u202e"},
    {"prompt": "fine"},
    "a \nb",
)


class TestNormalise(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Normalise()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(*ROWS)

    def test_every_text_is_cleaned(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert outcome.kept["text"].to_pylist() == ["clean", "café\n\nau lait", None, None, "a\nb"]
        pair = outcome.kept.to_pylist()[2]
        assert [turn["content"] for turn in pair["prompt"]] == ["be kind", "x"]
        assert (pair["completion"], pair["rejected"]) == ("y", "z")
        assert outcome.rejected["detail"].to_pylist() == [
            "the text holds nothing that can be seen",
            "the completion holds nothing that can be seen",
        ]
        assert outcome.changed["id"].to_pylist() == [pair["id"]], "an id ignores whitespace and the Unicode form"

    def test_rejected_records_keep_their_original_text(self, step: DataStep, table: pa.Table) -> None:
        assert apply_step(step, table).rejected["text"].to_pylist() == ["\u200b\ufeff", None]

    def test_the_step_is_idempotent(self, step: DataStep, table: pa.Table) -> None:
        result = apply_step(step, table).kept
        repeat = apply_step(step, result)
        assert repeat.kept.equals(result)
        assert (repeat.rejected.num_rows, repeat.changed.num_rows) == (0, 0)

    def test_clean_rows_do_not_change(self, step: DataStep) -> None:
        table = table_of("clean", {"prompt": "a", "completion": "b"})
        assert apply_step(step, table).kept.equals(table)

    def test_a_slice_of_a_chunked_table(self, step: DataStep, table: pa.Table) -> None:
        chunked = pa.concat_tables([table, table]).slice(3, 6)
        assert lines(apply_step(step, chunked).kept) == [4, 6, 7, 1, 2]


@pytest.mark.slow
@given(st.lists(st.tuples(st.text(), st.text()), max_size=6))
def test_the_step_is_idempotent_for_any_text(rows: list[tuple[str, str]]) -> None:
    table = table_of(*({"prompt": f"x{prompt}", "completion": f"y{answer}"} for prompt, answer in rows))
    result = apply_step(Normalise(), table).kept
    assert apply_step(Normalise(), result).kept.equals(result)


def test_compatible_forms_are_an_option() -> None:
    table = table_of("ﬁne", "x\u2003y")
    assert apply_step(Normalise(), table).kept["text"].to_pylist() == ["ﬁne", "x y"]
    assert apply_step(Normalise(unicode="nfkc"), table).kept["text"].to_pylist() == ["fine", "x y"]
    assert not reasons(apply_step(Normalise(quotes="straight"), table))
