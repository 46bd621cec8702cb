"""Processes are started by `posttrain.jobs` alone."""

import re
from pathlib import Path

import posttrain

_STARTS = re.compile(
    r"\b(subprocess|multiprocessing|ProcessPoolExecutor|loky)\b|\bos\.(fork|spawn\w*|system|popen|exec\w+)\b"
)

_BELOW = {"store/installation.py"}  # asks git for the revision, below `jobs`


def test_only_jobs_starts_processes() -> None:
    root = Path(posttrain.__file__).parent
    others = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] != "jobs"]
    assert len(others) > 100
    starting = {str(path.relative_to(root)) for path in others if _STARTS.search(path.read_text(encoding="utf-8"))}
    assert starting == _BELOW
