"""A map of the pool: each record as a point of the plane, near those with similar embeddings."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.select.pool_sample import sample_pool
from posttrain.select.selectors.similarity import Floats, whiten

MAP_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),  # null for labelled records, which are not in the score table
        pa.field("x", pa.float32()),
        pa.field("y", pa.float32()),
        pa.field("kind", pa.string()),  # pool, chosen or labelled
    ]
)

_MAX_POOL, _MAX_LABELLED = 2000, 1000
# Half of scikit-learn's: 2,000 points take 3 s on one core, and lie as they do after 1,000 steps.
_TSNE_STEPS = 500
_PERPLEXITY = 30.0


def pool_map(scores: pa.Table, chosen: pa.Table, labelled: np.ndarray | None, seed: int) -> pa.Table:
    """Computes a point in two dimensions for each record of a round.

    All chosen records are on it, with at most 2,000 of the pool (or more, where more are chosen) and 1,000 labelled
    ones, drawn by seed.

    Args:
        scores: the table of ``score_pool``: ``id`` and ``embedding``.
        chosen: the batch, whose ``id`` are in ``scores``.
        labelled: float [L, D] embeddings, by the scoring model, of records that have a label; None for none.
        seed: seed of the draws.

    Returns:
        Table with the schema ``MAP_SCHEMA``: the pool's records by id, then the labelled ones. The same call gives the
        same bytes on the same machine, whatever the number of threads.
    """
    table = scores.select(["id", "embedding"]).sort_by("id")
    is_chosen = compute.is_in(table["id"], value_set=chosen["id"].combine_chunks())
    sample = sample_pool(table.filter(compute.invert(is_chosen)), max(_MAX_POOL - chosen.num_rows, 0), seed)
    shown = pa.concat_tables([table.filter(is_chosen), sample]).sort_by("id")
    width = table.schema.field("embedding").type.list_size
    rows = shown["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, width)
    labelled_rows = np.zeros((0, width), np.float32) if labelled is None else _sample_labelled(labelled, seed)
    # Together: each set by itself would get axes of its own, and the distances between them would mean nothing.
    points = tsne_plane(np.concatenate([rows, labelled_rows.astype(rows.dtype)]))
    is_chosen = compute.is_in(shown["id"], value_set=chosen["id"].combine_chunks()).to_pylist()
    kinds = ["chosen" if flag else "pool" for flag in is_chosen] + ["labelled"] * len(labelled_rows)
    ids = shown["id"].to_pylist() + [None] * len(labelled_rows)
    return pa.table({"id": ids, "x": points[:, 0], "y": points[:, 1], "kind": kinds}, schema=MAP_SCHEMA)


def tsne_plane(embeddings: npt.NDArray[np.floating]) -> Floats:
    """Computes t-SNE of the whitened embeddings (see ``whiten``), which keeps neighbours near each other.

    L. van der Maaten and G. Hinton, Visualizing Data using t-SNE, JMLR 9 (2008), from the first two principal
    components (D. Kobak and P. Berens, The art of using t-SNE for single-cell transcriptomics, Nature Communications 10
    (2019), 5416). Fewer than four points, or equal points, are those components alone.

    Args:
        embeddings: float [N, D].

    Returns:
        float32 [N, 2].
    """
    points = whiten(embeddings)
    start = np.zeros((len(points), 2), np.float32)
    start[:, : min(2, points.shape[1])] = points[:, :2]
    spread = float(start[:, 0].std()) if len(start) else 0.0
    if len(points) < 4 or spread == 0:
        return start
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    # One thread: a sum in another order would move points between machines.
    with threadpool_limits(limits=1):
        coordinates: Floats = TSNE(
            # Not drawn, so that equal pools give equal maps; 1e-4 is the spread that Kobak and Berens advise.
            init=start / spread * 1e-4,
            perplexity=min(_PERPLEXITY, (len(points) - 1) / 3),
            max_iter=_TSNE_STEPS,
            random_state=0,
            n_jobs=1,
        ).fit_transform(points)
    return coordinates


def _sample_labelled(labelled: np.ndarray, seed: int) -> np.ndarray:
    """Draws at most 1,000 of the rows, in their order."""
    if len(labelled) <= _MAX_LABELLED:
        return labelled
    return labelled[np.sort(np.random.default_rng(seed).choice(len(labelled), _MAX_LABELLED, replace=False))]
