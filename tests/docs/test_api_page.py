"""The page on Python has every public name, and the example of a whole loop runs."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import posttrain

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_the_page_names_everything_public() -> None:
    names = re.findall(r"^\| `posttrain\.(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(names) == sorted(posttrain.__all__)
    assert all(getattr(posttrain, name).__doc__ for name in names)


def test_the_example_runs_the_whole_loop(tmp_path: Path, run: Callable[[str, Path], str]) -> None:
    script = ROOT / "examples" / "loop.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) < 40
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    code = "import runpy, sys\nsys.argv = ['loop.py', 'loop']\nrunpy.run_path('examples/loop.py')\n"
    output = run(f"python - <<'EOF'\n{code}EOF\n", tmp_path).splitlines()
    assert output[0] == "labels for round 1: 16 of 16"
    rounds = [re.fullmatch(r"round (\d): accuracy (\d\.\d{3}), (\w+)", line) for line in output[2:5]]
    assert [(line[1], line[3]) for line in rounds] == [("0", "baseline"), ("1", "deploy"), ("2", "deploy")]
    assert float(rounds[0][2]) < float(rounds[1][2]) < float(rounds[2][2])
    # In service is the model of round 1 again, not that of round 2.
    workspace = posttrain.Workspace(tmp_path / "loop")
    assert output[5] == f"rolled back to {workspace.models.champion}"
    assert workspace.status()["champion"]["round"] == 1
