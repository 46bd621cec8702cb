"""Labels that contradict what like records are labelled."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.records.schema import records
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.label_errors import LabelErrors, lsa_features, ngram_counts
from posttrain.data.steps.step import Step
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, reasons, table_of

SUBJECTS = ["card", "new card", "old card", "bank card", "credit card", "debit card", "lost card", "blue card"]
ASKED = {
    "arrival": ["When will my {} arrive?", "My {} has not arrived yet, where is it?"],
    "pin": ["How do I change the PIN code of my {}?", "I forgot the PIN code of my {}"],
}


def messages() -> list[dict[str, Any]]:
    """32 records; the labels of lines 3 and 20 are wrong."""
    rows = [
        {"prompt": pattern.format(subject), "completion": label}
        for label, patterns in ASKED.items()
        for pattern in patterns
        for subject in SUBJECTS
    ]
    for line in (3, 20):
        rows[line - 1]["completion"] = "pin" if line == 3 else "arrival"
    return rows


class TestLabelErrors(StepContract):
    @pytest.fixture
    def step(self) -> Step:
        return LabelErrors(features="ngrams", action="reject")

    @pytest.fixture
    def table(self) -> pa.Table:
        odd = [{"prompt": "rare", "completion": "seldom"}, {"prompt": "p", "completion": "pin", "rejected": "arrival"}]
        return table_of(*messages(), "plain text", *odd)

    def test_it_finds_what_was_planted(self, step: Step, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert reasons(outcome) == {3: "label error", 20: "label error"}
        details = ["likely `arrival`, labelled `pin`", "likely `pin`, labelled `arrival`"]
        assert outcome.rejected["detail"].to_pylist() == details
        assert all(score < 0.5 for score in outcome.rejected["score"].to_pylist())

    def test_it_reports_unless_told_otherwise(self, table: pa.Table) -> None:
        outcome = apply_step(LabelErrors(features="ngrams"), table)
        assert outcome.kept.equals(table)
        quality = outcome.facts["label_quality"].to_pylist()
        assert quality[32:] == [None] * 3, "not judged"
        assert np.argsort(quality[:32])[:2].tolist() in ([2, 19], [19, 2])
        suggested = outcome.facts["suggested_label"].to_pylist()
        assert {line: name for line, name in enumerate(suggested, 1) if name} == {3: "arrival", 20: "pin"}

    @pytest.mark.parametrize("prune", ["noise rate", "class", "both", "confident"])
    def test_the_papers_rules_can_decide(self, table: pa.Table, prune: Any) -> None:
        step = LabelErrors(features="ngrams", action="reject", prune=prune)
        assert {3, 20} <= set(lines(apply_step(step, table).rejected))

    def test_any_embedding_serves(self, table: pa.Table, monkeypatch: pytest.MonkeyPatch) -> None:
        class Bag:
            def embed(self, texts: Sequence[str]) -> np.ndarray:
                words = np.array([["PIN" in text, "arrive" in text, "?" in text] for text in texts], np.float32)
                return words / np.maximum(np.linalg.norm(words, axis=1, keepdims=True), 1)

        monkeypatch.setattr("posttrain.data.quality.features._load_embedder", lambda name: Bag())
        assert set(lines(apply_step(LabelErrors(action="reject"), table).rejected)) == {3, 20}

    def test_an_embedder_that_is_not_there_is_named_before_any_work(self) -> None:
        with pytest.raises(UserError, match="`nothing` is no embedder"):
            LabelErrors(embedder="nothing").check()
        LabelErrors(embedder="nothing", features="ngrams").check()

    def test_open_answers_are_refused(self) -> None:
        table = table_of(*({"prompt": f"q {n}", "completion": f"a {n}"} for n in range(20)))
        with pytest.raises(UserError, match="no answer has 5 different inputs"):
            apply_step(LabelErrors(features="ngrams"), table)

    def test_one_label_alone_is_never_wrong(self) -> None:
        table = table_of(*({"prompt": f"q {n}", "completion": "a"} for n in range(20)))
        assert set(apply_step(LabelErrors(features="ngrams"), table).facts["label_quality"].to_pylist()) == {None}

    def test_where_the_table_is_cut_changes_no_feature(self, table: pa.Table) -> None:
        texts = [row["prompt"][0]["content"] for row in records(table.to_pylist()[:32]).to_pylist()]
        whole = ngram_counts(texts)
        assert (whole[5:9] != ngram_counts(texts[5:9])).nnz == 0
        vectors = lsa_features(whole)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
        assert (lsa_features(whole) == vectors).all()
