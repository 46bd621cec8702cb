"""Labels that contradict those of similar records."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.records.record import records
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.label_errors import LabelErrors, lsa_features, ngram_counts
from posttrain.data.steps.step import DataStep
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, reasons, table_of

SUBJECTS = ["card", "new card", "old card", "bank card", "credit card", "debit card", "lost card", "blue card"]
QUESTIONS = {
    "arrival": ["When will my {} arrive?", "My {} has not arrived yet, where is it?"],
    "pin": ["How do I change the PIN code of my {}?", "I forgot the PIN code of my {}"],
}


def messages() -> list[dict[str, Any]]:
    """32 records; the labels of lines 3 and 20 are wrong."""
    rows = [
        {"prompt": pattern.format(subject), "completion": label}
        for label, patterns in QUESTIONS.items()
        for pattern in patterns
        for subject in SUBJECTS
    ]
    for line in (3, 20):
        rows[line - 1]["completion"] = "pin" if line == 3 else "arrival"
    return rows


class TestLabelErrors(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return LabelErrors(features="ngrams", action="reject")

    @pytest.fixture
    def table(self) -> pa.Table:
        odd = [{"prompt": "rare", "completion": "seldom"}, {"prompt": "p", "completion": "pin", "rejected": "arrival"}]
        return table_of(*messages(), "plain text", *odd)

    def test_it_finds_the_planted_errors(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert reasons(outcome) == {3: "label error", 20: "label error"}
        details = ["likely `arrival`, labelled `pin`", "likely `pin`, labelled `arrival`"]
        assert outcome.rejected["detail"].to_pylist() == details
        assert all(score < 0.5 for score in outcome.rejected["score"].to_pylist())

    def test_by_default_it_only_reports(self, table: pa.Table) -> None:
        outcome = apply_step(LabelErrors(features="ngrams"), table)
        assert outcome.kept.equals(table)
        quality = outcome.facts["label_quality"].to_pylist()
        assert quality[32:] == [None] * 3, "not judged"
        assert np.argsort(quality[:32])[:2].tolist() in ([2, 19], [19, 2])
        suggestions = outcome.facts["suggested_label"].to_pylist()
        assert {line: name for line, name in enumerate(suggestions, 1) if name} == {3: "arrival", 20: "pin"}

    def test_any_embedder_can_be_used(self, table: pa.Table, monkeypatch: pytest.MonkeyPatch) -> None:
        class StubEmbedder:
            def embed(self, texts: Sequence[str]) -> np.ndarray:
                features = np.array([["PIN" in text, "arrive" in text, "?" in text] for text in texts], np.float32)
                return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1)

        monkeypatch.setattr("posttrain.data.steps.resources._load_embedder", lambda name: StubEmbedder())
        assert set(lines(apply_step(LabelErrors(action="reject"), table).rejected)) == {3, 20}

    def test_check_raises_for_an_unknown_embedder(self) -> None:
        with pytest.raises(UserError, match="`nothing` is not an embedder"):
            LabelErrors(embedder="nothing").check()
        LabelErrors(embedder="nothing", features="ngrams").check()

    def test_open_answers_raise(self) -> None:
        table = table_of(*({"prompt": f"q {n}", "completion": f"a {n}"} for n in range(20)))
        with pytest.raises(UserError, match="no answer has 5 different inputs"):
            apply_step(LabelErrors(features="ngrams"), table)

    def test_records_of_one_input_make_no_label(self, table: pa.Table) -> None:
        repeated = [{"prompt": "a greeting", "completion": "hello"}] * 5
        outcome = apply_step(LabelErrors(features="ngrams"), table_of(*messages(), *repeated))
        quality = outcome.facts["label_quality"].to_pylist()
        assert (None in quality[:32], quality[32:]) == (False, [None] * 5)

    def test_a_single_label_is_not_judged(self) -> None:
        table = table_of(*({"prompt": f"q {n}", "completion": "a"} for n in range(20)))
        assert set(apply_step(LabelErrors(features="ngrams"), table).facts["label_quality"].to_pylist()) == {None}

    def test_chunks_of_the_table_change_no_feature(self, table: pa.Table) -> None:
        texts = [row["prompt"][0]["content"] for row in records(table.to_pylist()[:32]).to_pylist()]
        counts = ngram_counts(texts)
        assert (counts[5:9] != ngram_counts(texts[5:9])).nnz == 0
        vectors = lsa_features(counts)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
        assert (lsa_features(counts) == vectors).all()
