import numpy as np

from posttrain.attribution.values import InfluenceScores

TABLE = np.array([[0.5, -1.0], [2.0, 0.0], [-3.0, 4.0], [2.0, 0.1]])


def test_values_are_sums_with_standard_errors_over_the_test_records() -> None:
    """The standard error is that of a sum over sampled test records, checked by sampling."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(3, 200_000)) * [[1], [2], [3]]
    sums = scores.reshape(3, -1, 50).sum(2)
    result = InfluenceScores.from_scores(scores[:, :50], 7)
    np.testing.assert_allclose(result.values, scores[:, :50].sum(1))
    np.testing.assert_allclose(result.standard_errors, sums.std(1), rtol=0.3)
    assert result.evaluations == 7


def test_one_test_record_leaves_the_error_unknown() -> None:
    assert np.isnan(InfluenceScores.from_scores(TABLE[:, :1], 1).standard_errors).all()
