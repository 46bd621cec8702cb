"""How often the kinds of a mix are met, counted record by record."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.train.order import Order


def accounts(
    order: Order, kinds: Mapping[str, Sequence[str]], steps: int | None = None, *, samples: int = 0
) -> list[dict[str, Any]]:
    """What the stages with a mix meet of each kind.

    Args:
        order: of the training.
        kinds: for each ``mix_by`` what each record is.
        steps: count the first so many steps; None: all that are decided.
        samples: and so many samples of the step after them.

    Returns:
        For each stage with a mix ``stage`` (its number), ``by`` and ``kinds``: by name ``records`` (how many there
        are), ``met`` (samples), ``epochs`` (``met`` a record), ``fewest`` and ``most`` (how often one record is met).
    """
    end = order.decided if steps is None else steps
    found = []
    places, starts = order.stages, order.starts
    for number, (place, first, last) in enumerate(zip(places, starts[:-1], starts[1:], strict=True)):
        if place.config.mix is None:
            continue
        begun = first <= end < last
        times = order.seen(min(end, last), samples=samples if begun else 0, since=min(first, end))
        of = np.asarray(kinds[place.config.mix_by])
        names = sorted(set(of.tolist())) if place.config.mix == "sizes" else list(place.config.mix)
        found.append(
            {"stage": number, "by": place.config.mix_by, "kinds": {name: _account(times[of == name]) for name in names}}
        )
    return found


def _account(times: np.ndarray) -> dict[str, Any]:
    met = int(times.sum())
    return {
        "records": len(times),
        "met": met,
        "epochs": met / len(times),
        "fewest": int(times.min()),
        "most": int(times.max()),
    }
