"""Read, check, clean, split and version records."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.data.duplicates.near_duplicates import near_duplicates
    from posttrain.data.reading.tables import read
    from posttrain.data.versions.named_build import BuildConfig, build
    from posttrain.data.versions.stored_version import Version

__all__ = ["BuildConfig", "Version", "build", "near_duplicates", "read"]

_HOMES = {
    "BuildConfig": "versions.named_build",
    "Version": "versions.stored_version",
    "build": "versions.named_build",
    "near_duplicates": "duplicates.near_duplicates",
    "read": "reading.tables",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # late, as they load what every step works with
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
