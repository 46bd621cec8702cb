"""Reads amounts with a unit, such as 2GiB or 100M."""

import math
import re
from collections.abc import Mapping

BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
"""Units of memory and of files, in bytes."""

COUNTS = {"K": 10**3, "M": 10**6, "B": 10**9}
"""Units of counts, such as parameters or tokens."""

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([A-Za-z%]*)")


def read_amount(text: str, units: Mapping[str, int]) -> tuple[float, str] | None:
    """Returns the number of an amount and its unit, which is empty if it has none; None for anything else.

    Args:
        text: such as ``2 GiB``, ``100M`` or ``1e9``; a unit's case does not matter.
        units: that are known.
    """
    match = _AMOUNT.fullmatch(text.strip())
    known = {"": "", **{unit.lower(): unit for unit in units}}
    if match is None or match[2].lower() not in known or math.isinf(float(match[1])):
        return None
    return float(match[1]), known[match[2].lower()]
