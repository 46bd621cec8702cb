import numpy as np

from posttrain.attribution.values import InfluenceScores

TABLE = np.array([[0.5, -1.0], [2.0, 0.0], [-3.0, 4.0], [2.0, 0.1]])


def test_values_are_sums_and_their_errors_are_over_the_test_records() -> None:
    """Errors are of a sum over M drawn records: the variance over draws of both columns, checked by drawing."""
    generator = np.random.default_rng(0)
    many = generator.normal(size=(3, 200_000)) * [[1], [2], [3]]
    sums = many.reshape(3, -1, 50).sum(2)
    result = InfluenceScores.from_scores(many[:, :50], 7)
    np.testing.assert_allclose(result.values, many[:, :50].sum(1))
    np.testing.assert_allclose(result.standard_errors, sums.std(1), rtol=0.3)
    assert result.evaluations == 7


def test_one_test_record_leaves_the_error_unknown() -> None:
    assert np.isnan(InfluenceScores.from_scores(TABLE[:, :1], 1).standard_errors).all()
