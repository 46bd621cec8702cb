"""Every command that a message, a hint or a page names can be called: its verb and its options exist."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import posttrain
from posttrain.cli.main import app, main

PACKAGE = Path(posttrain.__file__).parent

# Words behind the program's name that are not verbs.
PROSE = {"and", "install", "works", "collects", "synthesises", "reads", "keeps", "worked", "writes", "wrote"}

# A command ends where its sentence continues.
PROGRAM = re.compile(r"posttrain\s")
COMMAND = re.compile(r"(?<![\w./-])posttrain((?: +(?!posttrain )[^\s,;:`\"'()|“”，；。：（）、<>]+)+)")


def texts(path: Path) -> Iterator[str]:
    """Yields the strings of a module as users see them, with `X` for what is filled in; of other files the text."""
    text = path.read_text(encoding="utf-8")
    if not PROGRAM.search(text):  # nothing to parse
        return
    if path.suffix != ".py":
        yield text
        return
    tree = ast.parse(text)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    # Docstrings are for those who read the code.
    inside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else " X" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def commands(text: str) -> Iterator[list[str]]:
    for match in COMMAND.finditer(re.sub(r"\s+", " ", text)):
        words = match[1].split()
        if words[0].strip(".") not in PROSE and re.fullmatch(r"--?[a-z-]+|[a-z]+[.]?", words[0]):
            yield words


def problem(words: list[str]) -> str | None:
    """Returns what is wrong with a command; None if it can be called."""
    command: Any = get_command(app)
    options: set[str] = set()
    rest = [word.rstrip(".") for word in words]
    while rest and rest[0] in getattr(command, "commands", {}):
        options |= {name for parameter in command.params for name in parameter.opts}
        command = command.load(rest[0]) if hasattr(command, "load") else command.commands[rest[0]]
        rest = rest[1:]
    if command is get_command(app) or command.name == "posttrain":
        return f"there is no verb {rest[0]}"
    if getattr(command, "default", None):
        command = command.load(command.default)
    # A group without a verb does nothing, but for `select`.
    if getattr(command, "commands", None) and not command.invoke_without_command:
        return f"{command.name} has no verb {rest[:1]}"
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return next(
        (f"no option {word}" for word in rest if word.startswith("-") and word.partition("=")[0] not in known), None
    )


def all_commands() -> dict[str, str]:
    """Returns a file in which it stands for each command."""
    files = itertools.chain(*(PACKAGE.rglob(f"*.{suffix}") for suffix in ("py", "html", "js", "json", "yaml")))
    files = (path for path in files if "echarts" not in path.parts)
    return {" ".join(words): path.name for path in sorted(files) for text in texts(path) for words in commands(text)}


@pytest.mark.slow
def test_every_command_that_is_named_can_be_called() -> None:
    named = all_commands()
    assert len(named) > 40
    assert {"run --partial", "models list"} <= named.keys()
    problems = {command: (path, fault) for command, path in named.items() if (fault := problem(command.split()))}
    assert not problems


@pytest.mark.parametrize("command", ["rum", "run --part", "models", "models shw", "data list --jsn"])
def test_a_wrong_command_is_found(command: str) -> None:
    assert problem(command.split()) is not None


def test_the_traceback_is_shown_wherever_its_option_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--debug", "status", "-w", str(tmp_path)], ["status", "-w", str(tmp_path), "--debug"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "Traceback" in capsys.readouterr().err


def test_a_command_in_the_wrong_folder_names_the_workspace_beside_it(
    posttrain: Any, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = small("one")
    monkeypatch.chdir(tmp_path)
    assert posttrain("run").mistake == ".: no posttrain.yaml here; there is one in one: add -w one"
    (root / "deep").mkdir()
    monkeypatch.chdir(root / "deep")
    assert posttrain("run").mistake.endswith(f"there is one in {root}: add -w {root}")
    small("two")
    monkeypatch.chdir(tmp_path)
    # Of several none is meant more than the others.
    assert posttrain("run").mistake.endswith("posttrain init .")


def test_a_training_that_is_not_there_is_not_taken_for_a_page(
    posttrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert posttrain("report", "nofolder").mistake.startswith("nofolder: there is no such folder; name a training")


@pytest.mark.parametrize(
    ("verb", "help"),
    [
        ("resume", "with the same --out"),
        ("chat", "transformers"),
        ("grpo", "reinforcement learning is not supported"),
        ("sft", "posttrain train --objective sft"),
        ("data build", "posttrain data add FILES --name NAME"),
    ],
)
def test_verbs_of_other_tools_are_answered(posttrain: Any, verb: str, help: str) -> None:
    line = posttrain(*verb.split(), "x").mistake
    assert line.startswith(f"`{verb.split()[-1]}` is not a verb; ")
    assert help in line


def test_a_training_that_torchrun_starts_is_refused(
    posttrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    line = posttrain("train", "--model", "tiny", "--data", tmp_path / "data.jsonl", "--out", tmp_path / "out").mistake
    assert line.startswith("WORLD_SIZE: trains in one process, and 2 were started; ")
    assert not (tmp_path / "out").exists()
