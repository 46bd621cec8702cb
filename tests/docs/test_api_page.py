"""The API page has every public name with its docstring, and the example of a whole loop runs."""

import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import posttrain

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_public_name_is_there_with_its_methods() -> None:
    titles = set(re.findall(r"^#{3,4} `([\w.]+)`$", PAGE, re.MULTILINE))
    for name in posttrain.__all__:
        assert f"posttrain.{name}" in titles
        value = getattr(posttrain, name)
        if isinstance(value, type) and value.__module__.startswith("posttrain.api"):
            assert {f"{name}.{method}" for method in vars(value) if not method.startswith("_")} <= titles


def test_every_part_that_the_page_on_extending_names_is_there() -> None:
    extending = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    table = "".join(line for line in extending.splitlines() if line.startswith("| "))
    paths = re.findall(r"`(posttrain\.[\w.]+\.[A-Z]\w+)`", table)
    assert len(paths) >= 14
    assert not [path for path in paths if f"### `{path}`" not in PAGE]


def test_docstrings_are_markdown() -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert "``" not in prose
    assert not re.findall(r"^(?:Args|Returns|Raises|Attributes):", prose, re.MULTILINE)
    assert inspect.getdoc(posttrain.Workspace.run).splitlines()[0] in prose
    assert "\n- `callbacks`: functions called with the values of each step" in prose


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
