"""Scores that run a model, against the model's own token probabilities."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.select.scores.answers import (
    answer_group,
    likelihood_group,
    perplexity_group,
    surprisal,
)
from posttrain.select.scores.passes import ScoreGroup, ScoringInput


@pytest.fixture(scope="module")
def lm(tiny_model: Path) -> LanguageModel:
    return load_language_model(tiny_model, TaskConfig(max_new_tokens=3), dtype="float32")


def scoring_inputs(*texts: str, answers: tuple[str, ...] = ()) -> list[ScoringInput]:
    return [ScoringInput([{"role": "user", "content": text}], answers) for text in texts]


def logits_after(lm: LanguageModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = lm.model(input_ids=torch.tensor([ids])).logits[0].double()
    return result


def test_the_likelihood_of_the_greedy_answer_equals_that_of_its_generation(lm: LanguageModel) -> None:
    greedy = answer_group().score(lm, scoring_inputs("one", "two"))
    greedy_answers = [
        ScoringInput(first.prompt, (answer,))
        for first, answer in zip(scoring_inputs("one", "two"), greedy["predicted"].to_pylist(), strict=True)
    ]
    assert likelihood_group().score(lm, greedy_answers).equals(greedy.select(["log_probability", "tokens"]))
    result = surprisal(greedy)
    np.testing.assert_allclose(result * greedy["tokens"].to_numpy(), -greedy["log_probability"].to_numpy(), rtol=1e-12)


def test_perplexity_is_of_the_text_without_the_template(lm: LanguageModel) -> None:
    result = perplexity_group().score(lm, scoring_inputs("blue sky", "a"))["perplexity"].to_pylist()
    ids = lm.tokenizer("blue sky")["input_ids"]
    logs = logits_after(lm, ids).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    assert result[0] == pytest.approx(math.exp(-float(logs.mean())), rel=1e-4)
    assert math.isnan(result[1])  # one token, which nothing predicts


@pytest.mark.parametrize(
    "group",
    [
        answer_group(),
        perplexity_group(),
    ],
    ids=lambda group: group.name,
)
def test_without_records_the_table_has_the_columns(lm: LanguageModel, group: ScoreGroup) -> None:
    empty = group.score(lm, [])
    assert isinstance(empty, pa.Table)
    assert empty.num_rows == 0
    assert empty.num_columns >= 1
