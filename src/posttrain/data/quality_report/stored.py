"""The quality report of a version that is stored."""

from itertools import tee

from posttrain.data.quality_report.profile import Profile, profile
from posttrain.data.quality_report.records import Tokenizer
from posttrain.data.versions.stored_version import Version


def profile_of(version: Version, tokenizer: Tokenizer | None = None) -> Profile:
    """The profile of a version's records, of what left, and of what its steps measured; read piece by piece."""
    tables, sides = tee(version.sided_tables())  # which are taken in turn, so that one table waits at most
    return profile(
        (table for table, _ in tables),
        (names for _, names in sides),
        rejected=version.rejected(),
        funnel=version.meta["funnel"],
        facts=version.facts(),
        tokenizer=tokenizer,
    )
