"""Problems that reading does not catch are rejected by name and counted."""

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.step import DataStep
from posttrain.data.steps.validity import Schema
from posttrain.testing.steps import StepContract, reasons, table_of

LONG = "x" * 998


def reason_for(text: str, **settings: object) -> str | None:
    return reasons(apply_step(Schema.model_validate(settings), table_of(text))).get(1)


class TestSchema(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Schema(max_characters=2000, max_turns=2)

    @pytest.fixture
    def table(self) -> pa.Table:
        turn = {"role": "user", "content": "a"}
        return table_of(
            "plain\ttext\r\n",
            "a\0b",
            "a\x1bb",
            "a\ufffdb",
            "a\ue000b",
            "Ã©tÃ© dâ€™Ã¢ge",
            "y" * 2001,
            {"prompt": [turn, turn, turn], "completion": "b"},
            {"prompt": [turn, {"role": "assistant", "content": " \n"}], "completion": "b"},
            {"prompt": [turn, turn], "completion": "b", "rejected": "c\x85"},
            {"prompt": "été d’âge", "completion": None},
            {"prompt": [{"role": "system", "content": "\x07"}, turn]},
        )

    def test_each_reason_by_name(self, step: DataStep, table: pa.Table) -> None:
        assert reasons(apply_step(step, table)) == {
            2: "NUL characters",
            3: "control characters",
            4: "replacement characters",
            5: "private-use characters",
            6: "mojibake",
            7: "too long",
            8: "too many turns",
            9: "empty turns",
            10: "control characters",
            12: "control characters",
        }

    def test_facts(self, step: DataStep, table: pa.Table) -> None:
        facts = apply_step(step, table).facts
        assert facts["mojibake"].to_pylist()[5] == 4
        assert facts["characters"].to_pylist()[:3] == [12, 3, 3]
        assert facts["turns"].to_pylist()[6:] == [0, 3, 2, 2, 1, 2]
        assert facts["replacement_share"].to_pylist()[3] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("under", "over", "reason"),
    [
        ("\ufffd" + LONG + "x", "\ufffd" + LONG, "replacement characters"),
        ("\ue000" * 10 + "x" * 990, "\ue000" * 10 + "x" * 989, "private-use characters"),
        ("Ã© Ã¼", "Ã© Ã¼ â€œ", "mojibake"),
        ("x" * 1_000_000, "x" * 1_000_001, "too long"),
    ],
)
def test_just_under_and_just_over(under: str, over: str, reason: str) -> None:
    assert reason_for(under) is None
    assert reason_for(over) == reason


TEXTS = ["été – ‘d’âge’ “œuvre”", "Привет, как дела?", "你好，世界。", "NÃO À ÂNGELA Ð Ñandú", "😀"]


@pytest.mark.parametrize("word", TEXTS)
@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_mojibake_is_distinguished_from_the_original(word: str, encoding: str) -> None:
    text = f"{word} " * 5
    assert reason_for(text) is None
    garbled = text.encode().decode(encoding, errors="ignore")
    counts = apply_step(Schema(), table_of(garbled)).facts["mojibake"].to_pylist()
    assert (counts[0] > 2) == (word != "你好，世界。")
