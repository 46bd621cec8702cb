"""Mixes records of several kinds by weight: the kinds' shares of a pass, and counts of their uses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.store.errors import UserError, suggest
from posttrain.train.data.config import MixConfig

if TYPE_CHECKING:
    from posttrain.train.data.batch_sampler import BatchSampler


@dataclass(frozen=True, eq=False)
class MixPart:
    """Records of one kind.

    Args:
        rows: int64 [R].
        share: records of them in each pass; a pass continues where the one before stopped, so that the uses of two
            records differ by one at most.
    """

    rows: np.ndarray
    share: int


def mix_parts(
    config: MixConfig, kinds: np.ndarray, rows: np.ndarray, where: str, passes: Callable[[int], int] | None = None
) -> list[MixPart]:
    """Returns the kinds that a mix names, with their shares of a pass as long as the number of their records.

    Shares are whole numbers of records by largest remainders; the part of a kind above its cap goes to the others by
    their weights.

    Args:
        config: phase with a mix.
        kinds: str [records].
        rows: int64, the eligible records.
        where: config key that errors name.
        passes: number of the phase's passes, from the records of a pass; needed with ``mix_epochs``.

    Raises:
        UserError: no record is of a kind, its share of a pass is less than a record, or the caps leave too little.
    """
    known = sorted(set(kinds[rows].tolist()))
    names = known if config.mix == "sizes" else list(config.mix or {})
    groups = [rows[kinds[rows] == name] for name in names]
    for name, group in zip(names, groups, strict=True):
        # A kind that is misspelt would silently get no share.
        if not len(group):
            raise UserError(f"no record is of `{name}`", where=where, fix=suggest(name, known))
    sizes = np.array([len(group) for group in groups], np.int64)
    limited = sizes if config.mix_limit is None else np.minimum(sizes, config.mix_limit)
    total = int(limited.sum())
    weights = np.array(list(config.mix.values()) if isinstance(config.mix, dict) else limited, np.float64)
    # Logarithms: weights to the power of 1 / T overflow at low temperatures.
    logs = np.log(weights) / config.mix_temperature
    caps = np.full(len(names), total if config.mix_limit is None else config.mix_limit)
    if config.mix_epochs is not None and passes is not None:
        count = passes(total)
        caps = np.minimum(caps, sizes * config.mix_epochs // count)
        # All caps together leave places empty.
        if caps.sum() < total:
            raise UserError(
                f"{count} passes of {total} records meet some more than {config.mix_epochs} times",
                where=f"{where}_epochs",
                fix="raise it, or train for fewer epochs or steps",
            )
    shares = apportion(total, logs, caps)
    for name, share in zip(names, shares, strict=True):
        if share == 0:
            raise UserError(f"the share of `{name}` is less than a record", where=where, fix="raise it or leave it out")
    return [MixPart(group, share) for group, share in zip(groups, shares, strict=True)]


def apportion(total: int, logs: np.ndarray, caps: np.ndarray | None = None) -> list[int]:
    """Splits ``total`` into whole numbers by weights, rounding up the largest remainders (Hamilton's method).

    Args:
        logs: float64, natural logarithms of the weights.
        caps: int64, upper bounds, which sum to ``total`` at least; the excess is split among the others by weight.
    """
    shares = np.zeros(len(logs), np.int64)
    free = np.ones(len(logs), bool)
    while free.any():
        remaining = total - int(shares.sum())
        # Relative to the largest weight that is still free: a weight that underflows next to a capped one may not next
        # to the rest.
        weights = np.where(free, np.exp(np.minimum(logs - logs[free].max(), 0.0)), 0.0)
        exact = weights / weights.sum() * remaining
        # Capped kinds are filled first, and what they leave is split again: the result does not depend on their order.
        full = np.zeros(0, bool) if caps is None else free & (exact >= caps)
        if not full.any():
            whole = np.floor(exact).astype(np.int64)
            # Stable, so that equal remainders go to the kind named first.
            first = np.argsort(np.where(free, whole - exact, np.inf), kind="stable")
            whole[first[: remaining - whole.sum()]] += 1
            shares += whole
            break
        assert caps is not None
        shares[full] = caps[full]
        free &= ~full
    counts: list[int] = shares.tolist()
    return counts


def mix_counts(
    sampler: "BatchSampler", kinds: Mapping[str, Sequence[str]], steps: int | None = None
) -> list[dict[str, Any]]:
    """Counts how often the phases with a mix use the records of each kind.

    Args:
        sampler: sampler of the training.
        kinds: each record's kind, by ``mix_by``.
        steps: count the first so many steps; None: all that are decided.

    Returns:
        For each phase with a mix ``phase`` (its number), ``by`` and ``kinds``: by name ``records`` (their number),
        ``met`` (samples), ``epochs`` (``met`` a record), ``fewest`` and ``most`` (uses of one record).
    """
    end = sampler.decided if steps is None else steps
    counts = []
    starts = sampler.starts
    for number, (position, first, last) in enumerate(zip(sampler.phases, starts[:-1], starts[1:], strict=True)):
        config = position.config
        if config.mix is None:
            continue
        uses = sampler.seen(min(end, last), since=min(first, end))
        record_kinds = np.asarray(kinds[config.mix_by])
        names = sorted(set(record_kinds.tolist())) if config.mix == "sizes" else list(config.mix)
        by_kind = {name: _kind_counts(uses[record_kinds == name]) for name in names}
        counts.append({"phase": number, "by": config.mix_by, "kinds": by_kind})
    return counts


def _kind_counts(uses: np.ndarray) -> dict[str, Any]:
    total = int(uses.sum())
    return {
        "records": len(uses),
        "met": total,
        "epochs": total / len(uses),
        "fewest": int(uses.min()),
        "most": int(uses.max()),
    }
