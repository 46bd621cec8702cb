"""Moments as files write them."""

from datetime import UTC, datetime, timedelta
from typing import Any

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECONDS = 1e11  # as seconds this lies in the year 5138, as milliseconds in 1973


def moment(value: Any) -> int:
    """Microseconds since 1970, UTC.

    Args:
        value: ISO 8601, in UTC where it names no zone; or seconds, or milliseconds, since 1970.

    Raises:
        ValueError: it is neither.
    """
    try:
        if isinstance(value, str):
            read = datetime.fromisoformat(value.strip())
            read = read if read.tzinfo else read.replace(tzinfo=UTC)
            return (read - _EPOCH) // timedelta(microseconds=1)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return round(value * (1_000 if abs(value) >= _MILLISECONDS else 1_000_000))
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"`{value}` is no moment; write it like 2026-01-31 or 2026-01-31T12:00:00Z")


def written(microseconds: int) -> str:
    """ISO 8601 in UTC, which `moment` reads back."""
    return (_EPOCH + timedelta(microseconds=microseconds)).isoformat()
