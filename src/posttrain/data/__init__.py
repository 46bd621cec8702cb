"""Read, check, clean, split and version records."""

from typing import TYPE_CHECKING

from posttrain.store.late_names import late_names

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

__getattr__ = late_names(__name__, _HOMES)
