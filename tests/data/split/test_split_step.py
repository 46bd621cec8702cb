"""The split of a set to which records were added and from which records were removed."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.split import SplitsConfig
from posttrain.data.split.split_step import Split
from posttrain.data.steps.apply import TableCorpus
from posttrain.data.steps.duplicates import Minhash
from posttrain.data.steps.step import GlobalResult, PreviousState
from posttrain.testing.steps import table_of


@dataclass(frozen=True)
class GrownCorpus(TableCorpus):
    """A corpus whose first rows the split has seen before."""

    old_splits: np.ndarray | None = None

    def previous_splits(self) -> np.ndarray:
        return super().previous_splits() if self.old_splits is None else self.old_splits


def chains(seed: int, count: int = 90) -> pa.Table:
    """Texts each of which is like an earlier one, so that few pairs link a cluster."""
    rng = np.random.default_rng(seed)
    words = ["".join(letters) for letters in rng.choice(list("abcdefghij"), (50, 4))]
    texts = [rng.choice(words, 20).tolist() for _ in range(12)]
    while len(texts) < count:
        text = list(texts[rng.integers(max(0, len(texts) - 30), len(texts))])
        text[rng.integers(20)] = words[rng.integers(50)]
        texts.append(text)
    return table_of(*(" ".join(text) for text in texts))


def decide(
    table: pa.Table, dead: np.ndarray, previous: PreviousState | None = None, old_splits: np.ndarray | None = None
) -> GlobalResult:
    step = Split(settings=SplitsConfig(test=0.4))
    corpus = GrownCorpus(table, step, previous_state=previous, old_splits=old_splits)
    corpus.alive[dead] = False
    return step.decide(corpus)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_incremental_clusters_equal_those_from_scratch_after_rows_are_removed(seed: int) -> None:
    table, rng = chains(seed), np.random.default_rng(seed)
    small = table.slice(0, 60)
    earlier = decide(small, rng.permutation(60)[:6])
    assert earlier.state is not None
    dead = rng.permutation(90)[:9]
    old_splits = np.full(90, -1, dtype=np.int8)
    old_splits[:60] = earlier.state["side"].to_numpy()
    grown, fresh = (
        decide(table, dead, PreviousState(earlier.state, False), old_splits),
        decide(table, dead, None, old_splits),
    )
    assert grown.state is not None
    assert fresh.state is not None
    assert grown.state["cluster"].equals(fresh.state["cluster"])
    assert len(np.unique(grown.state["cluster"].to_numpy())) < 60
    assert grown.rejections == fresh.rejections
    new_splits = grown.state["side"].to_numpy()
    old_rows = np.setdiff1d(np.flatnonzero(old_splits >= 0), dead)
    assert (new_splits[old_rows] == old_splits[old_rows]).all()


@pytest.mark.parametrize("answers", ["", "ab"])
@pytest.mark.parametrize("seed", range(4))
def test_the_split_reuses_the_clusters_of_near_duplicate_removal(seed: int, answers: str) -> None:
    table = chains(seed)
    completions = pa.array([answers[row % 2] if answers else None for row in range(90)], pa.string())
    table = table.set_column(table.schema.get_field_index("completion"), "completion", completions)
    result = Minhash().decide(TableCorpus(table, Minhash()))
    assert result.similarity is not None
    assert result.state is not None
    queries: list[int] = []

    class CountingCorpus(TableCorpus):
        def take(self, rows: np.ndarray) -> pa.Table:
            queries.append(len(rows))
            return super().take(rows)

    def split_with(clusters: dict[float, pa.ChunkedArray]) -> GlobalResult:
        corpus = CountingCorpus(table, Split(settings=SplitsConfig(test=0.4)), clusters=clusters)
        corpus.alive[list(result.rejections)] = False
        return Split(settings=SplitsConfig(test=0.4)).decide(corpus)

    fresh = split_with({})
    num_fresh = sum(queries)
    reused = split_with({result.similarity: result.state["cluster"]})
    assert reused.state is not None
    assert reused.state.equals(fresh.state)
    assert reused.rejections == fresh.rejections
    # Without answers one record of each cluster is left, and nothing is like it.
    assert sum(queries) - num_fresh == (num_fresh if answers else 0)
