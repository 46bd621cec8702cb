"""Choose what to label, what to train on and in which order."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.select import value
    from posttrain.select.selection import select

__all__ = ["select", "value"]


def __getattr__(name: str) -> Any:  # late, as they load what every method works with
    if name == "select":
        return import_module(f"{__name__}.selection").select
    if name == "value":
        return import_module(f"{__name__}.value")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
