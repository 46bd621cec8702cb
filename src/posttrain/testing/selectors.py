"""The contract of selectors, as a test class to inherit from.

class TestLongest(SelectorContract):
    @pytest.fixture
    def strategy(self):
        return "my_package.selectors:longest"
"""

from itertools import product

import numpy as np

from posttrain.select.selectors.registry import select

ScoreColumns = dict[str, np.ndarray]


def score_columns(rows: int, seed: int = 0, labels: int = 5, width: int = 12) -> ScoreColumns:
    """Draws a score table as selectors take it: ``probabilities``, ``embeddings`` and ``perplexity``."""
    generator = np.random.default_rng(seed)
    return {
        "probabilities": generator.dirichlet(np.ones(labels), rows),
        "embeddings": generator.normal(size=(rows, width)).astype(np.float32),
        "perplexity": generator.exponential(size=rows) + 1,
    }


class SelectorContract:
    """Tests what every selector promises; inherit and define the fixture ``strategy``, a name or a dotted path.

    A selector returns ``n`` distinct rows without a label, or all there are; the same call returns the same rows; its
    input stays unchanged; and predictions of labelled rows have no influence.
    """

    def test_returns_n_distinct_unlabelled_rows(self, strategy: str) -> None:
        for rows, n, share in product((0, 1, 7, 40), (0, 3, 50), (0.0, 0.4)):
            labelled = np.random.default_rng(rows).random(rows) < share
            batch = select(strategy, score_columns(rows), n, 1, labelled)
            assert batch.dtype == np.int64
            assert len(batch) == min(n, int((~labelled).sum())), (rows, n, share)
            assert len(set(batch.tolist())) == len(batch)
            assert all(0 <= row < rows and not labelled[row] for row in batch)

    def test_same_call_gives_same_rows(self, strategy: str) -> None:
        scores = score_columns(60)
        first = select(strategy, scores, 12, seed=3)
        # Copies: a selector that keeps state by the identity of an array would pass with the same ones.
        copies = {name: values.copy() for name, values in scores.items()}
        np.testing.assert_array_equal(first, select(strategy, copies, 12, seed=3))

    def test_does_not_change_its_input(self, strategy: str) -> None:
        scores = score_columns(30)
        before = {name: values.copy() for name, values in scores.items()}
        labelled = np.zeros(30, bool)
        select(strategy, scores, 5, labelled=labelled)
        for name, values in before.items():
            np.testing.assert_array_equal(scores[name], values)
        assert not labelled.any()

    def test_everything_labelled_leaves_nothing(self, strategy: str) -> None:
        batch = select(strategy, score_columns(6), 3, labelled=np.ones(6, bool))
        assert batch.dtype == np.int64
        assert batch.tolist() == []

    def test_all_rows_alike(self, strategy: str) -> None:
        scores = {name: np.repeat(values[:1], 20, axis=0) for name, values in score_columns(1).items()}
        scores["embeddings"][:] = 1.0  # no variance: whitening has no component to keep
        assert len(set(select(strategy, scores, 7).tolist())) == 7

    def test_few_distinct_rows(self, strategy: str) -> None:
        # Fewer different rows than n: k-means has empty clusters, and draws by distance have no odds.
        scores = {name: np.repeat(values, 10, axis=0) for name, values in score_columns(3).items()}
        assert len(set(select(strategy, scores, 12).tolist())) == 12

    def test_predictions_of_labelled_rows_do_not_matter(self, strategy: str) -> None:
        scores, labelled = score_columns(50), np.arange(50) % 3 == 0
        batch = select(strategy, scores, 9, 1, labelled)
        other = {name: values.copy() for name, values in scores.items()}
        # The loop appends labelled records with an embedding and placeholders in the other columns.
        other["probabilities"][labelled] = 0.2
        other["perplexity"][labelled] = 99.0
        np.testing.assert_array_equal(batch, select(strategy, other, 9, 1, labelled))
