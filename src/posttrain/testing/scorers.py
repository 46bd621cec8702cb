"""The contract of scorers, as a test class to inherit from.

class TestLength(ScorerContract):
    @pytest.fixture
    def spec(self):
        return LENGTH  # a ScoreSpec

    @pytest.fixture
    def scoring(self, tmp_path):
        return ScoringContext(ScoringModel.of(tiny_language_model(tmp_path)))
"""

import numpy as np

from posttrain.select.scores.context import ScoredRecords, ScoringContext
from posttrain.select.scores.registry import ScoreSpec

_PROMPTS = ["blue sky", "a red house by the sea", "blue sky", "one two three", "why?"]


def records_to_score(scoring: ScoringContext, prompts: list[str]) -> ScoredRecords:
    """Returns records of one user turn each, all with the same answer."""
    answer = scoring.labels[0] if scoring.labels else "an answer"
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return ScoredRecords(scoring, turns, [answer] * len(prompts))


class ScorerContract:
    """Tests what every scorer promises; inherit and define the fixtures ``spec`` and ``scoring``.

    A scorer returns one number a record; the same records get the same numbers; and a record's number does not depend
    on the records beside it.
    """

    def test_one_number_a_record(self, spec: ScoreSpec, scoring: ScoringContext) -> None:
        for count in (0, 1, len(_PROMPTS)):
            values = np.asarray(spec.compute(records_to_score(scoring, _PROMPTS[:count])), np.float64)
            assert values.shape == (count,)

    def test_same_records_get_the_same_numbers(self, spec: ScoreSpec, scoring: ScoringContext) -> None:
        first, second = (np.asarray(spec.compute(records_to_score(scoring, _PROMPTS)), np.float64) for _ in range(2))
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first[0], first[2], rtol=1e-5)  # records 0 and 2 are equal

    def test_a_number_does_not_depend_on_other_records(self, spec: ScoreSpec, scoring: ScoringContext) -> None:
        together = np.asarray(spec.compute(records_to_score(scoring, _PROMPTS)), np.float64)
        alone = [np.asarray(spec.compute(records_to_score(scoring, [prompt])), np.float64)[0] for prompt in _PROMPTS]
        np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6)

    def test_names_its_task_and_its_direction(self, spec: ScoreSpec) -> None:
        assert spec.of in ("labels", "text", "any", "labelled")
        assert spec.sign in (1, -1)
        assert spec.meaning
