"""Perplexity and preferences of a suite equal the model's own log-likelihoods."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.suite import run_suite
from posttrain.models.language_model import LanguageModel
from posttrain.models.likelihood import answer_log_likelihoods, text_log_likelihoods
from posttrain.store.errors import UserError
from posttrain.testing.scorers import ScorerContract
from posttrain.testing.scores import tiny_language_model
from posttrain.testing.steps import table_of


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny_language_model(tmp_path_factory.mktemp("tiny"))


def records(answers: list[str], text: bool = False) -> pa.Table:
    return table_of(
        *(
            {"text": answer} if text else {"prompt": f"question {row}", "completion": answer}
            for row, answer in enumerate(answers)
        )
    )


def pairs(*rows: tuple[str, str]) -> pa.Table:
    return table_of(
        *(
            {"prompt": f"question {row}", "completion": chosen, "rejected": rejected}
            for row, (chosen, rejected) in enumerate(rows)
        )
    )


def test_perplexity_is_the_exponential_of_the_mean_token_loss(writer: LanguageModel) -> None:
    expected = ["a cat", "a much longer dog"]
    result = run_suite(writer, records(list(expected)), SuiteConfig(scorer="perplexity"), "fluency")
    prompts = [[{"role": "user", "content": f"question {row}"}] for row in range(2)]
    sums, counts = answer_log_likelihoods(writer, prompts, expected)
    assert result.metrics["perplexity"] == pytest.approx(np.exp(-sums.sum() / counts.sum()))
    assert result.metrics["tokens"] == counts.sum()
    np.testing.assert_allclose(result.predictions["score"], sums)
    assert result.main == "perplexity"


def test_perplexity_of_plain_text_equals_the_models_loss(writer: LanguageModel) -> None:
    texts = ["plain words", "x", "some more plain words"]
    result = run_suite(writer, records(list(texts), text=True), SuiteConfig(scorer="perplexity"), "fluency")
    for text, score in zip(texts, result.predictions["score"].to_pylist(), strict=True):
        ids = torch.tensor([writer.tokenizer(text)["input_ids"]])
        loss = float(writer.model(input_ids=ids, labels=ids).loss.detach()) if ids.shape[1] > 1 else 0.0
        assert score == pytest.approx(-loss * (ids.shape[1] - 1), rel=1e-4)
    assert result.metrics["tokens"] == sum(len(text) - 1 for text in texts)


def test_windows_predict_every_token_once(writer: LanguageModel) -> None:
    text = "twelve bytes"
    ids = torch.tensor([writer.tokenizer(text)["input_ids"]])
    sums, counts = text_log_likelihoods(writer, [text], window=5)
    expected = 0.0
    for start in (0, 4, 8):
        part = ids[:, start : start + 5]
        expected -= float(writer.model(input_ids=part, labels=part).loss.detach()) * (part.shape[1] - 1)
    assert counts.tolist() == [11]
    assert sums[0] == pytest.approx(expected, rel=1e-4)


class TestPreference(ScorerContract):
    @pytest.fixture
    def suite(self) -> SuiteConfig:
        return SuiteConfig(scorer="preference")

    @pytest.fixture
    def records(self) -> pa.Table:
        return pairs(("a short answer", "no"), ("no", "a longer answer"), ("yes", "yes!"), ("ten words", "two"))


def test_a_pair_scores_by_the_models_mean_loss(writer: LanguageModel) -> None:
    rows = [("a good answer", "bad"), ("bad", "a good answer"), ("one two", "three four five"), ("x", "xyz")]
    result = run_suite(writer, pairs(*rows), SuiteConfig(scorer="preference"), "test")
    margins = []
    for row, answers in enumerate(rows):
        prompt = writer.prompt_ids([{"role": "user", "content": f"question {row}"}])
        losses = []
        for answer in answers:
            ids = prompt + writer.answer_ids(answer)
            labels = [-100] * len(prompt) + ids[len(prompt) :]
            output: Any = writer.model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels]))
            losses.append(float(output.loss.detach()))
        margins.append(losses[1] - losses[0])
    assert result.predictions["score"].to_pylist() == [float(margin > 0) for margin in margins]
    assert result.metrics["preference_accuracy"] == np.mean([margin > 0 for margin in margins])
    assert result.metrics["preference_margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    # The first pair is the second one turned round, so one of them is right.
    assert sum(result.predictions["score"].to_pylist()[:2]) == 1


def test_equal_answers_score_a_half(writer: LanguageModel) -> None:
    result = run_suite(writer, pairs(("same", "same")), SuiteConfig(scorer="preference"), "test")
    assert result.metrics == {"preference_accuracy": 0.5, "preference_margin": 0.0}


def test_a_record_without_a_rejected_answer_is_named(writer: LanguageModel) -> None:
    table = pa.concat_tables([pairs(("a", "b")), records(["no pair"])])
    with pytest.raises(UserError, match="has no rejected answer"):
        run_suite(writer, table, SuiteConfig(scorer="preference"), "test")
