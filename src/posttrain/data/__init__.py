"""Read, check, clean, split and version records."""

from posttrain.data.named_build import BuildConfig, build
from posttrain.data.near_duplicates import near_duplicates as near_duplicates
from posttrain.data.reading import read
from posttrain.data.stored_version import Version

__all__ = ["BuildConfig", "Version", "build", "near_duplicates", "read"]
