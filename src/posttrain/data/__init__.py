"""Read, check, clean, split and version records."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Not late as the others are: the file of the same name would take the function's place when something imports it.
from posttrain.data.near_duplicates import near_duplicates as near_duplicates

if TYPE_CHECKING:
    from posttrain.data.named_build import BuildConfig, build
    from posttrain.data.reading import read
    from posttrain.data.stored_version import Version

__all__ = ["BuildConfig", "Version", "build", "near_duplicates", "read"]

_HOMES = {"BuildConfig": "named_build", "Version": "stored_version", "build": "named_build", "read": "reading"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # late, as they load what every step works with
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
