"""The user's cache folder: what any process of this machine may reuse, and nothing depends on."""

import os
from pathlib import Path


def user_cache_folder() -> Path | None:
    """Returns this program's folder in the user's cache; None if the user has no home. It need not exist."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "posttrain"
