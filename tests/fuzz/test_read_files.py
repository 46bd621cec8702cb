"""The coverage-guided fuzzer of the readers finds nothing in a few seconds from a fixed seed."""

import os
import subprocess
import sys
from pathlib import Path


def test_reading_ends_in_records_or_a_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("read_files.py"))]
    # A child begins with its parent's peak of resident memory, which other tests may have made large: what counts here
    # is what one file allocates.
    limits = ["-timeout=20", "-rss_limit_mb=0", "-malloc_limit_mb=256"]
    options = ["-runs=800", "-seed=1", "-max_len=400", *limits, f"-artifact_prefix={tmp_path}/"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "Done 800 runs" in run.stderr
