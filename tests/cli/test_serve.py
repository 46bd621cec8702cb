"""The verb ``serve``."""

import json
import multiprocessing
import os
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer

from posttrain.cli.serve import serve
from posttrain.data.feedback.ingest import ingest
from posttrain.store.errors import UserError

_FORKS = multiprocessing.get_context("fork")  # a fresh interpreter would spend seconds on imports


def _run(root: Path, output: Path) -> None:
    sys.stdout = output.open("a", buffering=1)
    os.environ["POSTTRAIN_TOKEN"] = "geheim"
    app = typer.Typer()
    app.command()(serve)
    app(["--port", "0", "-w", str(root)])


def test_it_prints_its_address_collects_feedback_and_ends_cleanly(small: Any, tmp_path: Path) -> None:
    root, output = small(), tmp_path / "output"
    process = _FORKS.Process(target=_run, args=(root, output))
    process.start()
    try:
        deadline = time.monotonic() + 120
        while not (output.exists() and output.read_text().endswith("\n")):
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        address = output.read_text().strip().removeprefix("listening on ")
        assert address.startswith("http://127.0.0.1:")
        body = json.dumps({"id": "a", "prompt": "p", "completion": "c", "rating": "down"}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer geheim"}
        with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/feedback", body, headers)) as answer:
            assert (answer.status, json.load(answer)) == (201, {"id": "a", "repeated": False})
        with pytest.raises(UserError, match="another posttrain collects into this inbox"):
            serve(port=0, workspace=root)
        [batch] = ingest(root / ".posttrain" / "inbox")  # while the server runs
        assert batch.counts["pool"] == 1
        process.terminate()
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_unusable_addresses_folders_and_a_missing_package_are_refused(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTTRAIN_TOKEN", raising=False)
    root = small()
    with pytest.raises(UserError, match="anyone who reaches this address could post; set POSTTRAIN_TOKEN"):
        serve(host="0.0.0.0", workspace=root)
    with pytest.raises(UserError, match="--allowed-host: `http://x/` is not the name of a host; give the name"):
        serve(allowed_host=["http://x/"], workspace=root)
    with pytest.raises(UserError, match="there is no such folder"):
        serve(workspace=tmp_path / "nowhere")
    with socket.create_server(("127.0.0.1", 0)) as occupied, pytest.raises(UserError, match="cannot listen on"):
        serve(port=occupied.getsockname()[1], workspace=root)


@pytest.mark.parametrize(
    ("token", "message"),
    [("", "is blank"), (" \t", "is blank"), ("two words", "holds spaces"), ("schlüssel", "other than visible ASCII")],
)
def test_unusable_tokens_are_refused(
    posttrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, message: str
) -> None:
    monkeypatch.setenv("POSTTRAIN_TOKEN", token)
    mistake = posttrain("serve", "--port", "0", "-w", tmp_path).mistake
    assert mistake.startswith("POSTTRAIN_TOKEN: ")
    assert message in mistake
    assert list(tmp_path.iterdir()) == []


def test_it_is_a_verb(posttrain: Any) -> None:
    assert "POST /v1/feedback" in posttrain("serve", "--help").out
