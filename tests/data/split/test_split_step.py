"""The split of a set that has grown and lost records since."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.split import SplitsConfig
from posttrain.data.split.split_step import Split
from posttrain.data.steps.apply import TableCorpus
from posttrain.data.steps.duplicates import Minhash
from posttrain.data.steps.step import GlobalResult, PreviousState, SimilarityKind
from posttrain.testing.steps import table_of


class Grown(TableCorpus):
    """A corpus of which the split has seen the first rows before."""

    before: PreviousState | None = None
    past: np.ndarray | None = None

    def known(self) -> PreviousState | None:
        return self.before

    def sides(self) -> np.ndarray:
        return super().sides() if self.past is None else self.past


def chains(seed: int, count: int = 90) -> pa.Table:
    """Texts each of which is like an earlier one, so that clusters hang together by few."""
    rng = np.random.default_rng(seed)
    words = ["".join(letters) for letters in rng.choice(list("abcdefghij"), (50, 4))]
    texts = [rng.choice(words, 20).tolist() for _ in range(12)]
    while len(texts) < count:
        text = list(texts[rng.integers(max(0, len(texts) - 30), len(texts))])
        text[rng.integers(20)] = words[rng.integers(50)]
        texts.append(text)
    return table_of(*(" ".join(text) for text in texts))


def decided(
    table: pa.Table, dead: np.ndarray, known: PreviousState | None = None, sides: np.ndarray | None = None
) -> GlobalResult:
    step = Split(settings=SplitsConfig(test=0.4))
    corpus = Grown(table, step)
    object.__setattr__(corpus, "before", known)
    object.__setattr__(corpus, "past", sides)
    corpus.alive[dead] = False
    return step.decide(corpus)


@pytest.mark.parametrize("seed", range(25))
def test_clusters_of_a_set_that_lost_rows_are_those_from_scratch(seed: int) -> None:
    table, rng = chains(seed), np.random.default_rng(seed)
    small = table.slice(0, 60)
    before = decided(small, rng.permutation(60)[:6])
    assert before.state is not None
    dead = rng.permutation(90)[:9]
    sides = np.full(90, -1, dtype=np.int8)
    sides[:60] = before.state["side"].to_numpy()
    grown, fresh = decided(table, dead, PreviousState(before.state, False), sides), decided(table, dead, None, sides)
    assert grown.state is not None
    assert fresh.state is not None
    assert grown.state["cluster"].equals(fresh.state["cluster"])
    assert len(np.unique(grown.state["cluster"].to_numpy())) < 60
    assert grown.rejections == fresh.rejections
    now = grown.state["side"].to_numpy()
    had = np.setdiff1d(np.flatnonzero(sides >= 0), dead)
    assert (now[had] == sides[had]).all()


@pytest.mark.parametrize("answers", ["", "ab"])
@pytest.mark.parametrize("seed", range(4))
def test_what_near_duplicate_removal_found_is_not_looked_for_again(seed: int, answers: str) -> None:
    table = chains(seed)
    given = pa.array([answers[row % 2] if answers else None for row in range(90)], pa.string())
    table = table.set_column(table.schema.get_field_index("completion"), "completion", given)
    result = Minhash().decide(TableCorpus(table, Minhash()))
    assert result.clustered is not None
    assert result.state is not None
    queries: list[int] = []

    class After(Grown):
        clusters: ClassVar[dict[SimilarityKind, pa.ChunkedArray]] = {}

        def clustered(self) -> dict[SimilarityKind, pa.ChunkedArray]:
            return self.clusters

        def take(self, rows: np.ndarray) -> pa.Table:
            queries.append(len(rows))
            return super().take(rows)

    def split(clusters: dict[SimilarityKind, pa.ChunkedArray]) -> GlobalResult:
        After.clusters = clusters
        corpus = After(table, Split(settings=SplitsConfig(test=0.4)))
        corpus.alive[list(result.rejections)] = False
        return Split(settings=SplitsConfig(test=0.4)).decide(corpus)

    alone = split({})
    compared = sum(queries)
    after = split({result.clustered: result.state["cluster"]})
    assert after.state is not None
    assert after.state.equals(alone.state)
    assert after.rejections == alone.rejections
    # Of records without answers one a cluster is left, with nothing like it.
    assert sum(queries) - compared == (compared if answers else 0)
