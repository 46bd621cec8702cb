"""The score table holds the champion's label probabilities, or the likelihood of its answers."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import label_scores
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.select.pool_sample import sample_pool, sample_sizes
from posttrain.select.scores import uncertainty
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import ScoringModel
from posttrain.select.scores.registry import SCORES, ScoreSpec
from posttrain.select.scores.table import score_pool
from posttrain.store.errors import UserError
from posttrain.testing.scores import ScoreContract

pytestmark = pytest.mark.slow

LABELS = ["card lost", "card stolen", "refund", "top up"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return load_language_model(folder, TaskConfig(labels=LABELS, max_new_tokens=4), dtype="float32")


def pool(count: int) -> pa.Table:
    turn = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    return pa.table(
        {
            "id": [f"{number:020x}" for number in range(count)],
            "prompt": pa.array(
                [
                    [{"role": "user", "content": f"message {number * 7 % 11}"}] if number % 2 else None
                    for number in range(count)
                ],
                turn,
            ),
            "text": [None if number % 2 else f"plain {number}" for number in range(count)],
        }
    )


def context(model: LanguageModel, labels: Sequence[str] = LABELS) -> ScoringContext:
    return ScoringContext(ScoringModel.from_language_model(model), labels)


def test_scores_are_those_of_the_models_label_probabilities(model: LanguageModel) -> None:
    scores = score_pool(context(model), pool(9), 2000, seed=0)
    prompts = [[{"role": "user", "content": row["text"] or row["prompt"][0]["content"]}] for row in pool(9).to_pylist()]
    direct = label_scores(model, prompts, LABELS, embeddings=True)
    p = np.exp(direct.log_probabilities.astype(np.float64))
    np.testing.assert_allclose(scores["entropy"], uncertainty.entropy(p), atol=1e-5)
    np.testing.assert_allclose(scores["margin"], uncertainty.margin(p), atol=1e-5)
    np.testing.assert_allclose(scores["confidence"], p.max(axis=1), atol=1e-5)
    np.testing.assert_allclose(np.array(scores["probabilities"].to_pylist()), p, atol=1e-5)
    assert scores["predicted"].to_pylist() == [LABELS[row] for row in p.argmax(axis=1)]
    assert scores["runner_up"].to_pylist() == [LABELS[row] for row in np.argsort(-p, axis=1)[:, 1]]
    assert direct.embeddings is not None
    np.testing.assert_allclose(np.array(scores["embedding"].to_pylist()), direct.embeddings, atol=1e-5)
    assert scores.schema.field("embedding").type == pa.list_(pa.float32(), 96)


def test_pool_sample_is_counted_and_independent_of_row_order(model: LanguageModel) -> None:
    records = pool(30)
    shuffled = records.take(pa.array(np.random.default_rng(0).permutation(30)))
    first, second = (score_pool(context(model), table, 8, seed=4) for table in (records, shuffled))
    assert sample_sizes(first) == {"sampled": 8, "pool": 30}
    assert first.equals(second)
    other = sample_pool(records, 8, seed=5)["id"].to_pylist()
    assert other != first["id"].to_pylist()


def test_sample_is_uniform_over_ids() -> None:
    records = pool(20)
    counts = np.zeros(20)
    for seed in range(1500):
        counts[[int(id, 16) for id in sample_pool(records, 4, seed)["id"].to_pylist()]] += 1
    # binomial(1500, 0.2): mean 300, five standard deviations 77.
    assert np.abs(counts - 300).max() < 78


def test_free_text_is_scored_by_the_answers_likelihood(model: LanguageModel) -> None:
    from posttrain.models.generator import greedy_answers
    from posttrain.models.likelihood import answer_log_likelihoods

    scores = score_pool(context(model, ()), pool(4), 2000, seed=0)
    prompts = [[{"role": "user", "content": row["text"] or row["prompt"][0]["content"]}] for row in pool(4).to_pylist()]
    answers = [answer.text for answer in greedy_answers(model, prompts)]
    sums, counts = answer_log_likelihoods(model, prompts, answers)
    assert scores["predicted"].to_pylist() == answers
    np.testing.assert_allclose(scores["entropy"], -sums / counts, rtol=1e-4)
    np.testing.assert_allclose(scores["least_confidence"], 1 - np.exp(sums), rtol=1e-4)
    assert np.isnan(scores["margin"].to_numpy()).all()
    assert scores["runner_up"].null_count == 4


@pytest.mark.parametrize("labels", [LABELS, []])
def test_empty_pool(model: LanguageModel, labels: list[str]) -> None:
    scores = score_pool(context(model, labels), pool(0), 2000, seed=0)
    assert scores.num_rows == 0
    assert sample_sizes(scores) == {"sampled": 0, "pool": 0}


def test_record_without_input_is_named(model: LanguageModel) -> None:
    record = pool(1).set_column(2, "text", pa.array([None], pa.string()))
    with pytest.raises(UserError, match=f"pool record {0:020x}"):
        score_pool(context(model), record, 2000, seed=0)


class TestScoresOfLabels(ScoreContract):
    @pytest.fixture(params=["perplexity", "loss"])
    def spec(self, request: pytest.FixtureRequest) -> ScoreSpec:
        return SCORES[request.param]

    @pytest.fixture
    def scoring(self, model: LanguageModel) -> ScoringContext:
        return context(model)
