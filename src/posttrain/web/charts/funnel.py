"""A funnel of records: what came in, what was rejected for which reason, what was kept."""

from collections.abc import Sequence
from itertools import accumulate
from operator import sub

from posttrain.web.charts.svg import LETTER, element, figure, text, tooltip, truncate


def funnel(start: int, rejected: Sequence[tuple[str, int]], title: str, *, width: int = 760) -> str:
    """A bar for what came in, a piece cut off for each reason, and a bar for what is left.

    Args:
        start: records that came in.
        rejected: reason and records, in the order of the steps; below zero for records that a step added.
    """
    kept = start - sum(count for _, count in rejected)
    names = min(max([18, *(len(reason) for reason, _ in rejected)]) * LETTER + 10, 0.4 * width)
    room, step = width - names - 70, 28
    most = max(accumulate((count for _, count in rejected), sub, initial=start))
    scale = room / (most or 1)
    drawn, left = [], start
    rows = [("came in", start, 0, "bar-a"), *((reason, count, 1, "cut") for reason, count in rejected)]
    for at, (name, count, is_cut, class_) in enumerate([*rows, ("kept", kept, 0, "bar-kept")]):
        y = at * step + 4
        x = names + (left - max(count, 0)) * scale if is_cut else names
        left -= count if is_cut else 0
        length = max(abs(count) * scale, 2.0 if count else 0.0)
        share = f"{100 * abs(count) / start:.1f}%" if start else "none"
        words = f"{-count:+,}".replace("-", "−") if is_cut and count else f"{count:,}"
        class_ = "bar-a" if count < 0 else class_
        drawn.append(
            element(
                "g",
                tooltip(f"{name}: {abs(count):,} records{' added' if count < 0 else ''}, {share} of what came in"),
                text(truncate(name, names - 4), names - 8, y + 15, "" if is_cut else "strong", "end"),
                element("rect", x=names, y=y + 3, width=room, height=16, rx=3, class_="track"),
                element("rect", x=x, y=y + 3, width=length, height=16, rx=3, class_=class_),
                text(words, names + room + 8, y + 15, "strong"),
            )
        )
    return figure(width, (len(rows) + 1) * step + 4, title, *drawn)
