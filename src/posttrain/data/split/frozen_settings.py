"""Freezes settings that depend on counts in the first version, so that growth does not change them."""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from posttrain.data.split.assignment import DRAW_STEP, Floats, Indices, first_of_component, hash_draw, links
from posttrain.data.split.config import SplitsConfig, format_timestamp
from posttrain.store.errors import UserError

_STRATA = 10_000


def freeze_settings(keys: pa.Table, config: SplitsConfig, clusters: Indices | None = None) -> SplitsConfig:
    """Returns the config with everything decided that counts decide; what is frozen already stays.

    By time: ``since``, the timestamps that split the records by the shares. With strata: ``thresholds``, which are as
    near to the shares as the shares' whole numbers of this set's records allow, so that odds change as little as can
    be.
    The result is stored with the version, and all later versions use it.

    Args:
        keys, clusters: as in `assign_splits`.

    Raises:
        UserError: there are more than 10,000 strata, so the answers are no labels; too few records to find a time;
            no record that could be held out.
    """
    if not keys.num_rows:
        return config
    # Derived records are never held out, so counting them would shift the shares.
    keys, clusters = _originals(keys, clusters)
    if not keys.num_rows and config.shares[0] < 1:
        fix = "add records of your own, or set `data.splits` to null"
        raise UserError(
            "every record was derived from others, which no model is measured on", where="data.splits", fix=fix
        )
    if config.by == "time" and config.since is None:
        return config.model_copy(update={"since": _freeze_since(keys, config)})
    if config.stratify is not None and config.thresholds is None:
        return config.model_copy(update={"thresholds": _freeze_thresholds(keys, config, clusters)})
    return config


def _originals(keys: pa.Table, clusters: Indices | None) -> tuple[pa.Table, Indices | None]:
    """Drops derived records, which cannot be held out."""
    rows = np.flatnonzero(~np.asarray(keys["made"]))
    return keys.take(pa.array(rows)), None if clusters is None else clusters[rows]


def _freeze_since(keys: pa.Table, config: SplitsConfig) -> dict[str, str]:
    times = np.sort(keys["time"].cast(pa.int64()).to_numpy())
    train, validation, test = config.shares
    since = {}
    for name, share, before in (("validation", validation, train), ("test", test, train + validation)):
        index = round(before * len(times))
        if not share:
            continue
        if index == len(times):
            fix = "give the times in `data.splits.since`"
            raise UserError(
                f"{len(times)} records are too few to find where {name} begins", where="data.splits", fix=fix
            )
        since[name] = format_timestamp(int(times[index]))
    return since


def _freeze_thresholds(
    keys: pa.Table, config: SplitsConfig, clusters: Indices | None
) -> dict[str, tuple[float, float]]:
    heads, sizes = np.unique(first_of_component(links(keys, clusters)), return_counts=True)
    firsts = keys.take(pa.array(heads))
    draw = hash_draw(firsts["input_id"].to_pylist(), firsts["group"].to_pylist(), config.seed)
    strata = firsts["stratum"].fill_null("").combine_chunks().dictionary_encode()
    names = strata.dictionary.to_pylist()
    # Each stratum needs records of its own to hold out; this many strata means free-text answers.
    if len(names) > _STRATA:
        fix = "leave `stratify` out where answers are no labels"
        raise UserError(f"there are {len(names):,} strata", where="data.splits.stratify", fix=fix)
    _, validation, test = config.shares
    order = np.lexsort((draw, strata.indices.to_numpy()))
    borders = np.cumsum(np.bincount(strata.indices.to_numpy(), minlength=len(names)))[:-1]
    thresholds = {}
    for name, rows in zip(names, np.split(order, borders), strict=True):
        below_test, below_validation = _nearest_cuts(draw[rows], sizes[rows], (test, test + validation))
        thresholds[name] = (below_test, below_validation)
    return dict(sorted(thresholds.items()))


def _nearest_cuts(draw: Floats, sizes: Indices, shares: Iterable[float]) -> list[float]:
    """For each share the threshold below which the records' share is nearest to it.

    Args:
        draw: of the components, rising.
        sizes: records in each.
    """
    below = np.concatenate([[0], np.cumsum(sizes)])
    least = np.concatenate([[0.0], draw + DRAW_STEP])
    most = np.concatenate([draw, [1.0]])
    cuts = []
    for share in shares:
        count = int(np.argmin(np.abs(below - share * below[-1])))
        # Within the gap between two draws the share itself is the threshold, so later records have the config's odds.
        cuts.append(float(np.clip(share, least[count], most[count])))
    return cuts
