"""The funnels of a page: for each set what came in, what was turned away and why, and what was kept."""

from collections.abc import Iterable, Iterator, Sequence

from markupsafe import Markup

from posttrain.web.charts import funnel
from posttrain.web.charts.svg import responsive, without_step


def funnel_charts(counts: Sequence[tuple[str, str | None, int]]) -> Iterator[tuple[str, Markup]]:
    """Each set's name and funnel.

    Args:
        counts: set, why records were turned away, in words, or None for those that came in, and how many; in the order
            of the steps.
    """
    for name in dict.fromkeys(of for of, _, _ in counts):
        rows = [(reason, count) for of, reason, count in counts if of == name]
        start = sum(count for reason, count in rows if reason is None)
        rejected = [(reason, count) for reason, count in rows if reason is not None]
        yield name, responsive(_funnel_chart, start, rejected, f"records of {name}: in, rejected by reason, kept")


def _funnel_chart(start: int, rejected: Iterable[tuple[str, int]], title: str, width: int) -> str:
    return funnel(start, [(without_step(name, width), count) for name, count in rejected], title, width=width)
