"""What a run's outcome may depend on besides its key: versions and the machine."""

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy", "pyarrow")


def environment() -> dict[str, Any]:
    """Python, package versions, platform, processors and host of this process."""
    return dict(_environment())


@cache
def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "host": platform.node(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
