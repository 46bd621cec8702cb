"""Signals, standard streams that refuse, and paths that are not files: one line and an exit code, no traceback."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.process import stop_on_signals
from posttrain.store.errors import UserError

Call = Callable[..., Any]


def run(arguments: list[str], shell: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``posttrain ARGUMENTS`` with what ``shell`` puts behind it; the exit code is posttrain's."""
    command = f'"{sys.executable}" -m posttrain {" ".join(arguments)} {shell}'
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "code", "line"),
    [
        ("> /dev/full", 1, "posttrain: the output cannot be written: No space left on device"),
        # A reader that is gone before Python has started; one that reads a little is a matter of timing.
        ("| true", 141, "posttrain: the output was closed before its end"),
        (">&-", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_ends_in_one_line(shell: str, code: int, line: str) -> None:
    outcome = run(["config", "keys"], shell)
    assert (outcome.returncode, outcome.stderr.strip()) == (code, line)


@pytest.mark.slow
def test_a_full_standard_error_leaves_the_exit_code() -> None:
    outcome = run(["status", "-w", "/nowhere"], "2> /dev/full")
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (2, "", "")


@pytest.mark.slow
def test_an_ascii_locale_prints_what_it_can(tmp_path: Path) -> None:
    arguments = ["status", "-w", f'"{tmp_path}/é→"']
    outcome = run(arguments, "", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert outcome.returncode == 2
    assert outcome.stderr.isascii()
    assert outcome.stderr.count("\n") == 1
    assert outcome.stderr.startswith(f"posttrain: {tmp_path}/")
    keys = run(["config", "show", "--defaults"], "", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (keys.returncode, keys.stderr) == (0, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_a_verb_in_one_line(
    posttrain: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def interrupt(*arguments: Any) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("posttrain.cli.config.load_config", interrupt)
    outcome = posttrain("config", "check", "-w", tmp_path)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err == "stopped; the same command resumes from here\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_the_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "-w", "PATH"],
        ["init", "PATH"],
        ["report", "PATH"],
        ["train", "--config", "PATH"],
        ["train", "--model", "tiny", "--data", "PATH", "--out", "out"],
        ["train", "--model", "PATH", "--data", "x.csv", "--out", "out"],
        ["data", "check", "PATH"],
        ["data", "add", "PATH", "--name", "x"],
        ["select", "compare", "PATH"],
        ["label", "import", "PATH"],
    ],
)
@pytest.mark.parametrize("path", ["pipe", "loop", "x" * 300])
def test_paths_that_are_no_files_are_refused_by_every_verb(
    posttrain: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.symlink("loop", "loop")
    outcome = posttrain(*[path if argument == "PATH" else argument for argument in arguments])
    assert outcome.code == 2
    # `data check` lists its problems on standard output.
    (line,) = (outcome.err.removeprefix("posttrain: ") + outcome.out).splitlines()[:1]
    assert "is a pipe" in line if path == "pipe" else "cannot be read: " in line


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("task", {"labels": "PATH"}),
        ("data", {"pool": ["PATH"]}),
        ("data", {"test": ["PATH"]}),
        ("label", {"annotator": "oracle", "file": "PATH"}),
        ("evaluate", {"suites": {"test": {}, "other": {"data": "PATH", "scorer": "exact_match"}}}),
    ],
)
@pytest.mark.parametrize("path", ["pipe", "loop", "x" * 300 + ".csv", "folder"])
def test_paths_of_the_config_that_are_no_files_are_refused(
    posttrain: Call, small: Any, section: str, values: dict[str, Any], path: str
) -> None:
    root = small(**{section: json.loads(json.dumps(values).replace("PATH", path))})
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to("loop")
    # A folder that `datasets` has not saved would be hashed file by file, be it `/` itself.
    (root / "folder").mkdir()
    (root / "folder" / "x.csv").write_text("text,label\n")
    line = posttrain("config", "check", "-w", root).mistake
    assert len(line) < 800
    assert path[:50] in line


def test_config_show_masks_secrets(posttrain: Call, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small(
        store={"database": "postgresql://me:hidden1@host/db", "artifacts": "s3://bucket/x?secret=hidden2"},
        deploy={"webhook": "https://hooks.example.com/hidden3", "command": "deploy --token hidden4"},
    )
    for options in ([], ["--json"]):
        outcome = posttrain("config", "show", "-w", root, *options)
        assert outcome.code == 0, outcome
        assert not re.search("hidden[0-9]", outcome.out)
        assert "postgresql://me:***@host/db" in outcome.out
    outcome = posttrain("--debug", "run", "-w", root)
    assert outcome.code in (1, 2)
    assert not re.search("hidden[0-9]", outcome.err)


def test_log_lines_mask_secrets(posttrain: Call, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    posttrain("status", "-w", tmp_path)  # sets the log up
    logging.getLogger("posttrain").warning("%s refused", "https://me:hidden@host/x")
    assert "https://me:***@host/x refused" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--model", "tiny", "--data", "data.jsonl", "--out"],
        ["merge", "tiny", "tiny", "--out"],
        ["init"],
        ["demo", "--quick", "--dir"],
        ["label", "import"],
        ["report", "-w"],
    ],
)
def test_an_address_where_a_path_is_meant_is_refused(
    posttrain: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    line = posttrain(*arguments, "s3://bucket/x").mistake
    assert line.startswith("s3://bucket/x: is an address, not a path of this machine")
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_an_address_is_refused_in_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.merge.api import merge
    from posttrain.train.api import train
    from posttrain.tune import minimize

    monkeypatch.chdir(tmp_path)
    for call in (
        lambda out: train("tiny", [{"prompt": "a", "completion": "b"}], out),
        lambda out: merge(["tiny", "tiny"], out=out, method="linear"),
        lambda out: minimize(lambda trial: 0.0, {"x": {"float": [0.0, 1.0]}}, budget=1, out=out),
    ):
        with pytest.raises(UserError, match="gs://bucket/x: is an address"):
            call("gs://bucket/x")
    assert list(tmp_path.iterdir()) == []
