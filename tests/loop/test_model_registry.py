"""Promote and roll back; the stable path and the hooks follow, after a kill at any moment too."""

import http.server
import json
import os
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.loop.hooks import DeployConfig
from posttrain.loop.model_registry import ModelRegistry
from posttrain.store.errors import UserError, WorkError
from posttrain.store.stage_runner import run_stage
from posttrain.store.workspace import Workspace

A, B, C = "abc"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace.create(tmp_path / "workspace") as store:
        yield store


@pytest.fixture
def model(store: Workspace) -> dict[str, str]:
    """Ids of models that hold nothing but their name."""

    def create(name: str) -> str:
        def work(out: Path, scratch: Path) -> dict[str, Any]:
            (out / "name").write_text(name)
            return {}

        return run_stage(store, name, 1, kind="model", inputs={}, config={}, seed=0, round=None, work=work).id

    return {name: create(name) for name in "abc"}


def in_service(store: Workspace) -> str:
    return (store.champion_path / "name").read_text()


def test_promote(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    assert registry.champion is None
    deployment = registry.promote(model[A], round=3, reason="better")
    assert (deployment.model_id, deployment.round, deployment.action) == (model[A], 3, "promote")
    assert (deployment.reason, deployment.hook) == ("better", "none")
    assert registry.champion == deployment
    assert in_service(store) == A
    assert registry.promote(model[A], round=4) == deployment, "the champion is no second deployment"
    registry.promote(model[B], round=4)
    assert in_service(store) == B


def test_only_models_can_be_promoted(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    other = run_stage(
        store, "x", 1, kind="dataset", inputs={}, config={}, seed=0, round=None, work=lambda out, scratch: {}
    )
    for id in ("model-0000000000000000", other.id):
        with pytest.raises(UserError, match=f"`{id}` is no model of this workspace"):
            registry.promote(id, round=None)
    assert registry.champion is None
    assert not store.champion_path.exists()


def test_a_damaged_champion_names_the_way_back(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    registry.promote(model[A], round=0)
    registry.promote(model[B], round=1)
    (store.artifacts.path(model[B]) / "name").write_text("flipped")
    with Workspace.open(store.root) as later:  # what a process has verified it trusts
        registry = ModelRegistry(later)
        with pytest.raises(WorkError, match=r"the champion: .*`posttrain models rollback` restores the previous one"):
            registry.settle()
        registry.rollback()
        assert in_service(later) == A


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        ("abc<", "b"),
        ("abc<<", "a"),
        ("abc<c<", "b"),
        ("ab<c<", "a"),
        ("abc<<c<", "a"),
        ("aba<", "b"),
        ("abab<<", "b"),
        ("abab<<<", "a"),
        ("aab<", "a"),
        ("ab<b<", "a"),
    ],
)
def test_rolling_back_undoes_promotions_one_by_one(
    store: Workspace, model: dict[str, str], steps: str, ends: str
) -> None:
    registry = ModelRegistry(store)
    for step in steps:
        if step == "<":
            registry.rollback("bad")
        else:
            registry.promote(model[step], round=None)
    assert in_service(store) == ends
    assert registry.champion is not None
    assert registry.champion.action == "rollback"


@pytest.mark.parametrize("steps", ["", "a", "ab<", "abc<<"])
def test_there_may_be_no_earlier_champion(store: Workspace, model: dict[str, str], steps: str) -> None:
    registry = ModelRegistry(store)
    for step in steps:
        if step == "<":
            registry.rollback()
        else:
            registry.promote(model[step], round=None)
    before = store.metadata.deployments()
    with pytest.raises(UserError, match="no earlier champion"):
        registry.rollback()
    assert store.metadata.deployments() == before


def test_settle_after_a_kill_between_the_row_and_the_link(
    store: Workspace, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = ModelRegistry(store)
    registry.promote(model[A], round=0)

    def killed(self: Workspace, id: str) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "link_champion", killed)
        with pytest.raises(KeyboardInterrupt):
            registry.promote(model[B], round=1)
    assert in_service(store) == A
    ModelRegistry(store).settle()
    assert in_service(store) == B
    assert [deployment.model_id for deployment in store.metadata.deployments()] == [model[A], model[B]]


def test_settle_puts_a_missing_or_wrong_link_right(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    registry.settle()  # nothing to do yet
    registry.promote(model[A], round=0)
    store.champion_path.unlink()
    registry.settle()
    assert in_service(store) == A
    store.champion_path.unlink()
    store.champion_path.symlink_to("nowhere")
    registry.settle()
    assert in_service(store) == A


def hook(root: Path, body: str) -> DeployConfig:
    """A command that runs ``body`` as Python in the workspace."""
    script = root / "hook.py"
    script.write_text(f"import json, os, sys\n{body}\n")
    return DeployConfig(command=shlex.join([sys.executable, str(script)]))


APPENDS_A_CALL = """
variables = {name: value for name, value in os.environ.items() if name.startswith("POSTTRAIN_")}
with open("calls.jsonl", "a") as file:
    sees = open(variables["POSTTRAIN_CHAMPION"] + "/name").read()
    print(json.dumps({**variables, "cwd": os.getcwd(), "sees": sees}), file=file)
"""


def hook_calls(store: Workspace) -> list[dict[str, str]]:
    return [json.loads(line) for line in (store.root / "calls.jsonl").read_text().splitlines()]


def test_a_command_is_run(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store, hook(store.root, APPENDS_A_CALL))
    registry.promote(model[A], round=0)
    registry.promote(model[B], round=1)
    registry.rollback()
    registry.settle()
    assert hook_calls(store) == [
        {
            "POSTTRAIN_CHAMPION": str(store.champion_path),
            "POSTTRAIN_MODEL": model[name],
            "POSTTRAIN_ACTION": action,
            "cwd": str(store.root),
            "sees": name,
        }
        for name, action in ((A, "promote"), (B, "promote"), (A, "rollback"))
    ]
    assert [deployment.hook for deployment in store.metadata.deployments()] == ["done"] * 3


@pytest.mark.parametrize("command", ["false", "no-such-program-anywhere", "'unclosed", "sleep 5"])
def test_a_command_that_fails_is_called_again(
    store: Workspace, model: dict[str, str], command: str, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    logging.getLogger("posttrain").propagate = True
    deployment = ModelRegistry(store, DeployConfig(command=command, timeout=0.2)).promote(model[A], round=0)
    assert deployment.hook == "failed"
    assert in_service(store) == A
    assert "deploy.command" in caplog.text
    mended = ModelRegistry(store, hook(store.root, APPENDS_A_CALL))
    mended.settle()
    mended.settle()
    assert [entry["POSTTRAIN_MODEL"] for entry in hook_calls(store)] == [model[A]]
    assert mended.champion is not None
    assert mended.champion.hook == "done"


def test_a_command_is_run_after_a_kill(
    store: Workspace, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = hook(store.root, APPENDS_A_CALL)

    def killed(*arguments: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.loop.model_registry.call", killed)
        with pytest.raises(KeyboardInterrupt):
            ModelRegistry(store, hooks).promote(model[A], round=0)
    ModelRegistry(store, hooks).settle()
    assert len(hook_calls(store)) == 1


@pytest.fixture
def listener() -> Iterator[tuple[str, list[Any], list[int]]]:
    """A web server: its address, what was posted to it, and the statuses that it will answer with."""
    posted: list[Any] = []
    answers: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", posted, answers
    server.shutdown()
    server.server_close()


def test_a_webhook_is_called_until_it_succeeds(
    store: Workspace, model: dict[str, str], listener: tuple[str, list[Any], list[int]]
) -> None:
    address, posted, answers = listener
    answers += [500, 404]
    registry = ModelRegistry(store, DeployConfig(webhook=address))
    assert registry.promote(model[A], round=2, reason="better").hook == "failed"
    registry.settle()
    registry.settle()
    registry.settle()
    assert len(posted) == 3
    assert registry.champion is not None
    assert registry.champion.hook == "done"
    body = {
        "model": model[A],
        "action": "promote",
        "round": 2,
        "reason": "better",
        "path": str(store.champion_path),
    }
    assert posted == [("application/json", body)] * 3


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/", "http://127.0.0.1:port/", "https://"])
def test_a_webhook_that_cannot_be_reached(store: Workspace, model: dict[str, str], address: str) -> None:
    assert ModelRegistry(store, DeployConfig(webhook=address, timeout=2)).promote(model[A], round=0).hook == "failed"
    assert in_service(store) == A


@pytest.mark.parametrize("address", ["no address", "ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_a_webhook_is_a_web_address(address: str) -> None:
    with pytest.raises(UserError, match="`webhook`: must start with http"):
        DeployConfig.read({"webhook": address}, "posttrain.yaml")


def test_the_environment_reaches_the_command(
    store: Workspace, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEPLOY_TARGET", "staging")
    ModelRegistry(store, hook(store.root, "open('t', 'w').write(os.environ['DEPLOY_TARGET'])")).promote(
        model[A], round=0
    )
    assert (store.root / "t").read_text() == "staging"
    assert "POSTTRAIN_MODEL" not in os.environ
