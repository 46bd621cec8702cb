"""The contract of scores, numbers of pool records for selection; that of a suite's scorers is in `scorers`.

Inherit from the test class:

class TestLength(ScoreContract):
    @pytest.fixture
    def spec(self):
        return LENGTH  # a ScoreSpec
"""

from pathlib import Path

import numpy as np
import pytest

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.select.scores.context import ScoringBatch, ScoringContext
from posttrain.select.scores.passes import ScoringModel
from posttrain.select.scores.registry import ScoreSpec
from posttrain.select.scores.uncertainty import Floats

_LABELS = ["yes", "no", "maybe"]
# Two are equal, and lengths differ: batches are padded and sorted by length, where scores of neighbours could leak.
_PROMPTS = ["blue sky", "a red house by the sea", "blue sky", "one two three", "why?"]


def tiny_language_model(folder: Path, task: TaskConfig = TaskConfig(max_new_tokens=4)) -> LanguageModel:  # noqa: B008
    """Loads a randomly initialised model of about 300,000 float32 parameters, written to ``folder``."""
    # float32: in a lower precision a record's numbers differ with the records in its batch.
    return load_language_model(write_tiny_model(folder), task, dtype="float32")


def scoring_batch(scoring: ScoringContext, prompts: list[str]) -> ScoringBatch:
    """Returns records of one user turn each, all with the same answer."""
    answer = scoring.labels[0] if scoring.labels else "an answer"
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return ScoringBatch(scoring, turns, [answer] * len(prompts))


class ScoreContract:
    """Tests what every score of records promises; inherit and define the fixture ``spec``, a `ScoreSpec`.

    A score has one number per record; the same records get the same numbers; and a record's number depends neither on
    the other records of its batch nor on their order. Redefine the fixture ``scoring`` for another model than a
    tiny one.
    """

    @pytest.fixture
    def scoring(self, spec: ScoreSpec, tmp_path: Path) -> ScoringContext:
        """The model that scores, with labels for a score that needs their probabilities."""
        labels = _LABELS if spec.task == "labels" else []
        lm = tiny_language_model(tmp_path / "tiny", TaskConfig(labels=labels, max_new_tokens=4))
        return ScoringContext(ScoringModel.from_language_model(lm), labels)

    def test_one_number_a_record(self, spec: ScoreSpec, scoring: ScoringContext) -> None:
        for count in (0, 1, len(_PROMPTS)):
            assert _scores(spec, scoring, _PROMPTS[:count]).shape == (count,)

    def test_a_number_depends_on_its_record_alone(self, spec: ScoreSpec, scoring: ScoringContext) -> None:
        together, again = (_scores(spec, scoring, _PROMPTS) for _ in range(2))
        np.testing.assert_array_equal(together, again)
        np.testing.assert_allclose(together[0], together[2], rtol=1e-5)  # records 0 and 2 are equal
        backwards = _scores(spec, scoring, _PROMPTS[::-1])[::-1]
        alone = [_scores(spec, scoring, [prompt])[0] for prompt in _PROMPTS]
        # Not exactly: another batch adds up in another order, and the last digits of float32 differ.
        for others in (backwards, alone):
            np.testing.assert_allclose(together, others, rtol=1e-4, atol=1e-6)

    def test_names_its_task_and_its_direction(self, spec: ScoreSpec) -> None:
        assert spec.task in ("labels", "text", "any", "labelled")
        assert spec.sign in (1, -1)
        assert spec.summary


def _scores(spec: ScoreSpec, scoring: ScoringContext, prompts: list[str]) -> Floats:
    return np.asarray(spec.compute(scoring_batch(scoring, prompts)), np.float64)
