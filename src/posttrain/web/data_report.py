"""The page of a dataset version: its quality report, and what changed since another version."""

from pathlib import Path

from posttrain.data.quality_report.drift import Drift
from posttrain.data.quality_report.profile import Profile
from posttrain.web.data_figures import shown_profile
from posttrain.web.drift_figures import shown_drift
from posttrain.web.page import now_text, render_page, write_page


def render_data(
    profile: Profile, drift: Drift | None = None, heading: str = "Dataset", since: str = "", created: str = ""
) -> str:
    """The page as HTML; it loads nothing.

    Args:
        profile: of the version that the page is about, the newer one where there are two.
        drift: what changed from an older version to this one.
        heading: name of the version.
        since: name of the older version.
        created: when the page was made, in the caller's words.
    """
    return render_page(
        "data_report.html",
        shown=shown_profile(profile),
        drift=shown_drift(drift) if drift else None,
        heading=heading,
        since=since or "an older version",
        created=created,
    )


def write_data_report(
    path: Path, profile: Profile, drift: Drift | None = None, heading: str = "Dataset", since: str = ""
) -> None:
    """Write the page to ``path``, whose folder exists: whole or not at all. The arguments of `render_data`.

    Raises:
        UserError: the disk refused.
    """
    write_page(path, render_data(profile, drift, heading, since, now_text()))
