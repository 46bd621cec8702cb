"""A verb loads what it works with, and nothing else does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.exceptions import TyperException
from typer.main import get_command

from posttrain.cli.main import app

HEAVY = {"torch", "transformers", "sklearn", "scipy", "ray", "fastapi", "pandas"}
STATEMENTS = {
    "help": "main(['--help'])",
    "data help": "main(['data', '--help'])",
    "data list": "main(['data', 'list'])",
    "data list beside a config": "main(['init', '.']); main(['data', 'list'])",
    "config check": "main(['init', '.']); main(['config', 'check'])",
    "posttrain.data": "import posttrain.data; posttrain.data.build",
}
PROGRAM = """
import json, sys
from posttrain.cli import main as module

def main(arguments):
    assert module._run(arguments) in (0, 2)

{statement}
print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))
"""


@pytest.mark.slow
@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
def test_nothing_heavy_is_loaded(tmp_path: Path, statement: str) -> None:
    program = PROGRAM.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert not HEAVY & set(json.loads(done.stdout.splitlines()[-1]))


def _listed(group: Any, path: tuple[str, ...] = ()) -> list[Any]:
    """Every verb with the line that a list of verbs has of it, and itself."""
    result = []
    for name, verb in group.verbs.items():
        command = group.load(name)
        result.append(((*path, name), verb.help, command))
        if hasattr(command, "verbs"):
            result += _listed(command, (*path, name))
    return result


def test_lists_say_what_verbs_say() -> None:
    listed = _listed(get_command(app))
    assert {path for path, *_ in listed} >= {("train",), ("data", "add"), ("data", "list"), ("data", "tag")}
    for path, line, command in listed:
        assert command.name == path[-1]
        assert " ".join(command.help.split("\n\n")[0].split()) == line, path


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(TyperException, match="'list'"):
        get_command(app)(["data", "lst"], standalone_mode=False)


def test_functions_of_data_keep_their_names() -> None:
    import posttrain.data
    import posttrain.data.duplicates.near_duplicates
    import posttrain.data.versions.build_version

    assert posttrain.data.near_duplicates(["a text", "a text"]).tolist() == [0, 0]
    with pytest.raises(AttributeError, match="nothing"):
        _ = posttrain.data.nothing
