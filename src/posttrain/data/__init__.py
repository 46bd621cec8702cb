"""Read, check, clean, split and version records."""

from typing import TYPE_CHECKING

from posttrain.store.extensions import lazy_exports

if TYPE_CHECKING:
    from posttrain.data.duplicates.near_duplicates import near_duplicates
    from posttrain.data.reading.reader import read
    from posttrain.data.versions.named_build import BuildConfig, build
    from posttrain.data.versions.version import Version

__all__ = ["BuildConfig", "Version", "build", "near_duplicates", "read"]

_HOMES = {
    "BuildConfig": "versions.named_build",
    "Version": "versions.version",
    "build": "versions.named_build",
    "near_duplicates": "duplicates.near_duplicates",
    "read": "reading.reader",
}

__getattr__ = lazy_exports(__name__, _HOMES)
