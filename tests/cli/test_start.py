"""Heavy libraries are loaded only by the verbs that use them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.exceptions import TyperException
from typer.main import get_command

from posttrain.cli.main import app

HEAVY = {"torch", "transformers", "sklearn", "scipy", "ray", "fastapi", "pandas"}
STATEMENTS = [
    "import posttrain.data; posttrain.data.build",
    "main(['--help'])",
    "main(['data', '--help'])",
    "main(['data', 'list'])",
    "main(['init', '.'])",
    "main(['data', 'list'])",  # beside a config
    "main(['config', 'check'])",
    "for verb in module._Verbs.verbs: main([verb, '--help'])",
]
PROGRAM = """
import sys
from posttrain.cli import main as module

def main(arguments):
    assert module._run(arguments) in (0, 2)

for statement in {statements}:
    exec(statement)
    assert not {heavy} & {{name.partition('.')[0] for name in sys.modules}}, statement
"""


@pytest.mark.slow
def test_no_heavy_library_is_loaded(tmp_path: Path) -> None:
    """In one process: each statement adds its modules to those of the statements before."""
    program = PROGRAM.format(statements=STATEMENTS, heavy=HEAVY)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr


def _list_verbs(group: Any, path: tuple[str, ...] = ()) -> list[Any]:
    """The path of every verb, its line in the list of verbs, and its command."""
    result = []
    for name, verb in group.verbs.items():
        command = group.load(name)
        result.append(((*path, name), verb.help, command))
        if hasattr(command, "verbs"):
            result += _list_verbs(command, (*path, name))
    return result


def test_the_lists_of_verbs_have_their_help_lines() -> None:
    verbs = _list_verbs(get_command(app))
    assert {path for path, *_ in verbs} >= {("train",), ("data", "add"), ("data", "list"), ("data", "tag")}
    for path, line, command in verbs:
        assert command.name == path[-1]
        assert " ".join(command.help.split("\n\n")[0].split()) == line, path


def test_an_unknown_verb_suggests_the_nearest() -> None:
    with pytest.raises(TyperException, match="'list'"):
        get_command(app)(["data", "lst"], standalone_mode=False)


def test_functions_are_not_hidden_by_modules_of_the_same_name() -> None:
    import posttrain.data
    import posttrain.data.similarity.near_duplicates
    import posttrain.data.versions.build_version

    assert posttrain.data.near_duplicates(["a text", "a text"]).tolist() == [0, 0]
    with pytest.raises(AttributeError, match="nothing"):
        _ = posttrain.data.nothing
