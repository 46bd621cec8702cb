"""The short form of the fuzzer of chat templates finds nothing."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_templates_end_in_a_rendering_or_a_clear_line() -> None:
    command = [sys.executable, str(Path(__file__).with_name("template_fuzz.py")), "--count", "30", "--seed", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "42 templates: " in run.stdout
