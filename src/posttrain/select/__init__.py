"""Choose what to label, what to train on and in which order."""

from typing import TYPE_CHECKING

from posttrain.store.late_names import late_names

if TYPE_CHECKING:
    from posttrain.select import value
    from posttrain.select.selection import select

__all__ = ["select", "value"]

__getattr__ = late_names(__name__, {"select": "selection", "value": ""})
