"""Charts at the widths that pages have room for."""

from collections.abc import Callable

from markupsafe import Markup

WIDE, NARROW = 760, 340
"""In pixels, for the desk and for the phone."""


def at_both_widths(draw: Callable[..., str], *arguments: object, **options: object) -> Markup:
    """The chart that ``draw(*arguments, width=..., **options)`` makes, once at each width.

    The style sheet shows the one that fits; an empty chart stays empty.
    """
    wide, narrow = (draw(*arguments, width=width, **options) for width in (WIDE, NARROW))
    return Markup(f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>' if wide else "")


def fitting(name: str, width: int) -> str:
    """A name such as ``gopher: word count`` without the step, where a chart is narrow."""
    return name if width >= 500 else name.split(": ", 1)[-1]
