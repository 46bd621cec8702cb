"""A funnel of records: what came in, what was rejected for which reason, what was kept."""

from collections.abc import Sequence

from posttrain.web.charts.svg import LETTER, element, figure, shortened, text, tooltip


def funnel(start: int, rejected: Sequence[tuple[str, int]], title: str, *, width: int = 760) -> str:
    """A bar for what came in, a piece cut off for each reason, and a bar for what is left.

    Args:
        start: records that came in.
        rejected: reason and records, in the order of the steps.
    """
    kept = start - sum(count for _, count in rejected)
    names = min(max([18, *(len(reason) for reason, _ in rejected)]) * LETTER + 10, 0.4 * width)
    room, step = width - names - 70, 28
    scale = room / (start or 1)
    drawn, left = [], start
    rows = [("came in", start, 0, "bar-a"), *((reason, count, 1, "cut") for reason, count in rejected)]
    for at, (name, count, is_cut, class_) in enumerate([*rows, ("kept", kept, 0, "bar-kept")]):
        y = at * step + 4
        x = names + (left - count) * scale if is_cut else names
        left -= count if is_cut else 0
        length = max(count * scale, 2.0 if count else 0.0)
        share = f"{100 * count / start:.1f}%" if start else "none"
        words = f"−{count:,}" if is_cut and count else f"{count:,}"
        drawn.append(
            element(
                "g",
                tooltip(f"{name}: {count:,} records, {share} of what came in"),
                text(shortened(name, names - 4), names - 8, y + 15, "" if is_cut else "strong", "end"),
                element("rect", x=names, y=y + 3, width=room, height=16, rx=3, class_="track"),
                element("rect", x=x, y=y + 3, width=length, height=16, rx=3, class_=class_),
                text(words, names + room + 8, y + 15, "strong"),
            )
        )
    return figure(width, (len(rows) + 1) * step + 4, title, *drawn)
