"""The contract of scorers, which mark a model's answers in an evaluation suite; `scores` tests what values records.

Inherit from the test class:

class TestBrevity(ScorerContract):
    @pytest.fixture
    def suite(self):
        return SuiteConfig(scorer="my_scorer:BREVITY")
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from posttrain.evaluate.config import EvaluateConfig, SuiteConfig
from posttrain.evaluate.metric_names import metric_names
from posttrain.evaluate.scorers import SCORERS, scorer_name
from posttrain.evaluate.suite import SuiteResult, run_suite
from posttrain.models.language_model import LanguageModel
from posttrain.testing.scores import tiny_language_model
from posttrain.testing.steps import table_of


class ScorerContract:
    """Tests what every scorer promises; inherit and define the fixture ``suite``, a `SuiteConfig` that names it.

    A scorer gives each record one finite score; the same records get the same scores, in any order and company;
    and the metrics of a suite are those that the scorer names. Redefine the fixtures ``lm`` and ``records`` for another
    model than a tiny one, or for answers of another kind.
    """

    @pytest.fixture
    def lm(self, tmp_path: Path) -> LanguageModel:
        """Returns the model that answers; one with a label set for a scorer that needs it."""
        return tiny_language_model(tmp_path / "tiny")

    @pytest.fixture
    def records(self, lm: LanguageModel) -> pa.Table:
        """Returns records of different lengths, with an answer each; a label where the task has a label set."""
        answers = lm.task.label_set or ["a short answer", "no"]
        prompts = ["blue sky", "a red house by the sea", "one two three", "why?"]
        return table_of(
            *({"prompt": text, "completion": answers[row % len(answers)]} for row, text in enumerate(prompts))
        )

    def test_one_finite_score_a_record(self, lm: LanguageModel, suite: SuiteConfig, records: pa.Table) -> None:
        predictions = _run(lm, suite, records).predictions
        assert predictions["id"].to_pylist() == records["id"].to_pylist()
        assert np.isfinite(predictions["score"].to_numpy()).all()
        assert predictions["valid"].null_count == 0

    def test_same_records_get_the_same_scores(self, lm: LanguageModel, suite: SuiteConfig, records: pa.Table) -> None:
        first, second = (_run(lm, suite, records) for _ in range(2))
        assert first.predictions.equals(second.predictions)
        assert first.metrics == second.metrics

    def test_order_of_the_records_does_not_matter(
        self, lm: LanguageModel, suite: SuiteConfig, records: pa.Table
    ) -> None:
        backwards = records.take(list(range(records.num_rows))[::-1])
        forwards_scores, backwards_scores = (_scores(lm, suite, table) for table in (records, backwards))
        np.testing.assert_allclose(forwards_scores, backwards_scores[::-1], rtol=1e-4, atol=1e-6)

    def test_a_score_does_not_depend_on_other_records(
        self, lm: LanguageModel, suite: SuiteConfig, records: pa.Table
    ) -> None:
        alone = [_scores(lm, suite, records.slice(row, 1))[0] for row in range(records.num_rows)]
        # Not exactly: another batch adds up in another order, and the last digits of float32 differ.
        np.testing.assert_allclose(_scores(lm, suite, records), alone, rtol=1e-4, atol=1e-6)

    def test_metrics_are_those_that_it_names(self, lm: LanguageModel, suite: SuiteConfig, records: pa.Table) -> None:
        has_labels = bool(lm.task.label_set)
        scorer = SCORERS[scorer_name(suite, has_labels)]
        result = _run(lm, suite, records)
        # A gate is checked against these names before anything runs: a metric that is missing would fail its round.
        assert set(result.metrics) == scorer.metrics | (scorer.label_metrics if has_labels else frozenset())
        assert {scorer.main, scorer.paired} <= set(result.metrics)
        config = EvaluateConfig(suites={"test": suite})
        assert {f"gain.{scorer.paired}.low", f"champion.{scorer.main}"} <= metric_names(config, has_labels)
        # The interval is that of the scores, so their mean must be the metric that its interval is about.
        assert result.metrics[scorer.paired] == pytest.approx(result.predictions["score"].to_numpy().mean())


def _run(lm: LanguageModel, suite: SuiteConfig, records: pa.Table) -> SuiteResult:
    return run_suite(lm, records, suite, "test")


def _scores(lm: LanguageModel, suite: SuiteConfig, records: pa.Table) -> np.ndarray:
    return np.asarray(_run(lm, suite, records).predictions["score"].to_numpy())
