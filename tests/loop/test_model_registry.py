"""Promotions and rollbacks: the stable path and the hooks follow, even after a kill at any moment."""

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
import torch
from safetensors.torch import save_file

from posttrain.loop.hooks import DeployConfig
from posttrain.loop.model_registry import ModelRegistry
from posttrain.store.errors import DamagedArtifactError, UserError, WorkError
from posttrain.store.stage_runner import run_stage
from posttrain.store.workspace import Workspace

A, B, C = "abc"


@pytest.fixture
def model(store: Workspace) -> dict[str, str]:
    """Ids of models that consist only of their name."""

    def create(name: str) -> str:
        def work(out: Path, scratch: Path) -> dict[str, Any]:
            (out / "name").write_text(name)
            return {}

        return run_stage(store, name, 1, kind="model", inputs={}, config={}, seed=0, round=None, work=work).id

    return {name: create(name) for name in "abc"}


def champion_name(store: Workspace) -> str:
    return (store.champion_path / "name").read_text()


def test_a_promotion_is_recorded_and_changes_the_champion(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    assert registry.champion is None
    deployment = registry.promote(model[A], round=3, reason="better")
    assert (deployment.model_id, deployment.round, deployment.action) == (model[A], 3, "promote")
    assert (deployment.reason, deployment.hook) == ("better", "none")
    assert registry.champion == deployment
    assert champion_name(store) == A
    assert registry.promote(model[A], round=4) == deployment, "promoting the champion again is not a second deployment"
    registry.promote(model[B], round=4)
    assert champion_name(store) == B


def test_a_model_that_is_not_finite_cannot_be_promoted(store: Workspace) -> None:
    def work(out: Path, scratch: Path) -> dict[str, Any]:
        save_file({"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])}, out / "model.safetensors")
        return {}

    broken = run_stage(store, "x", 1, kind="model", inputs={}, config={}, seed=0, round=None, work=work)
    with pytest.raises(UserError, match="tensor b holds NaN or infinite numbers"):
        ModelRegistry(store).promote(broken.id, round=None)
    assert ModelRegistry(store).champion is None


def test_only_models_can_be_promoted(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    other = run_stage(
        store, "x", 1, kind="dataset", inputs={}, config={}, seed=0, round=None, work=lambda out, scratch: {}
    )
    for id in ("model-0000000000000000", other.id):
        with pytest.raises(UserError, match=f"`{id}` is not a model of this workspace"):
            registry.promote(id, round=None)
    assert registry.champion is None
    assert not store.champion_path.exists()


def test_the_error_about_a_damaged_champion_suggests_a_rollback(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    registry.promote(model[A], round=0)
    registry.promote(model[B], round=1)
    (store.artifacts.path(model[B]) / "name").write_text("flipped")
    with Workspace.open(store.root) as later:  # a process verifies an artifact only once
        registry = ModelRegistry(later)
        with pytest.raises(WorkError, match=r"the champion: .*`posttrain models rollback` restores the previous one"):
            registry.sync()
        registry.rollback()
        assert champion_name(later) == A


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "champion"),
    [
        ("abc<", "b"),
        ("abc<<", "b"),  # typed twice is once
        ("abc<A", "a"),
        ("abc<A<", "a"),
        ("abc<AB<", "b"),
        ("abc<c<", "b"),
        ("ab<c<", "a"),
        ("abcA<b<", "a"),
        ("abcA<AA", "a"),
        ("aba<", "b"),
        ("aab<", "a"),
        ("ab<b<", "a"),
        ("abB<", "a"),  # the champion itself is not a change, so that the promotion is still the last one
    ],
)
def test_a_rollback_undoes_the_last_promotion_once(
    store: Workspace, model: dict[str, str], steps: str, champion: str
) -> None:
    """``<`` is a rollback, a capital one to that model, a small letter a promotion."""
    registry = ModelRegistry(store)
    for step in steps:
        if step == "<":
            registry.rollback("bad")
        elif step.isupper():
            registry.rollback("bad", to=model[step.lower()])
        else:
            registry.promote(model[step], round=None)
    assert champion_name(store) == champion
    assert registry.champion is not None
    assert registry.champion.action == "rollback"


@pytest.mark.parametrize("steps", ["", "a"])
def test_a_rollback_without_an_earlier_champion_is_refused(store: Workspace, model: dict[str, str], steps: str) -> None:
    registry = ModelRegistry(store)
    for step in steps:
        registry.promote(model[step], round=None)
    before = store.metadata.deployments()
    with pytest.raises(UserError, match="no earlier champion"):
        registry.rollback()
    assert store.metadata.deployments() == before


def test_a_rollback_to_a_model_that_never_was_champion_is_refused(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    registry.promote(model[A], round=0)
    with pytest.raises(UserError, match=f"`{model[C]}` was never the champion; posttrain models promote {model[C]}"):
        registry.rollback(to=model[C])


@pytest.mark.parametrize(
    ("steps", "earlier"),
    [("", ""), ("a", ""), ("abc", "ba"), ("aba", "b"), ("abcA", ""), ("abcB", "a"), ("abcAC", "a"), ("abcAb", "a")],
)
def test_the_earlier_champions_are_those_that_no_rollback_removed(
    store: Workspace, model: dict[str, str], steps: str, earlier: str
) -> None:
    registry = ModelRegistry(store)
    for step in steps:
        if step.isupper():
            registry.rollback(to=model[step.lower()])
        else:
            registry.promote(model[step], round=None)
    assert registry.earlier_champions() == [model[name] for name in earlier]


@pytest.mark.parametrize("steps", ["<", "c"])
def test_a_damaged_model_does_not_become_the_champion(store: Workspace, model: dict[str, str], steps: str) -> None:
    registry = ModelRegistry(store)
    for name in "ab":
        registry.promote(model[name], round=None)
    for name in "ac":
        damaged = store.artifacts.path(model[name]) / "name"
        damaged.chmod(0o644)
        damaged.write_text("flipped")
    before = store.metadata.deployments()
    with Workspace.open(store.root) as later:
        registry = ModelRegistry(later)
        with pytest.raises(DamagedArtifactError):
            registry.rollback() if steps == "<" else registry.promote(model[C], round=None)
    assert store.metadata.deployments() == before
    assert champion_name(store) == B


def test_settle_after_a_kill_between_the_row_and_the_link(
    store: Workspace, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = ModelRegistry(store)
    registry.promote(model[A], round=0)

    def die(self: Workspace, id: str) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "link_champion", die)
        with pytest.raises(KeyboardInterrupt):
            registry.promote(model[B], round=1)
    assert champion_name(store) == A
    ModelRegistry(store).sync()
    assert champion_name(store) == B
    assert [deployment.model_id for deployment in store.metadata.deployments()] == [model[A], model[B]]


def test_settle_repairs_a_missing_or_wrong_link(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    registry.sync()  # nothing to do yet
    registry.promote(model[A], round=0)
    store.champion_path.unlink()
    registry.sync()
    assert champion_name(store) == A
    store.champion_path.unlink()
    store.champion_path.symlink_to("nowhere")
    registry.sync()
    assert champion_name(store) == A


def hook(root: Path, body: str) -> DeployConfig:
    """A command that runs ``body`` as Python in the workspace."""
    script = root / "hook.py"
    script.write_text(f"import json, os, sys\n{body}\n")
    return DeployConfig(command=shlex.join([sys.executable, str(script)]))


LOG_CALL = """
variables = {name: value for name, value in os.environ.items() if name.startswith("POSTTRAIN_")}
with open("calls.jsonl", "a") as file:
    name = open(variables["POSTTRAIN_CHAMPION"] + "/name").read()
    print(json.dumps({**variables, "cwd": os.getcwd(), "name": name}), file=file)
"""


def hook_calls(store: Workspace) -> list[dict[str, str]]:
    return [json.loads(line) for line in (store.root / "calls.jsonl").read_text().splitlines()]


def test_the_command_runs_after_each_deployment(store: Workspace, model: dict[str, str]) -> None:
    registry = ModelRegistry(store, hook(store.root, LOG_CALL))
    registry.promote(model[A], round=0)
    registry.promote(model[B], round=1)
    registry.rollback()
    registry.sync()
    assert hook_calls(store) == [
        {
            "POSTTRAIN_CHAMPION": str(store.champion_path),
            "POSTTRAIN_MODEL": model[name],
            "POSTTRAIN_ACTION": action,
            "cwd": str(store.root),
            "name": name,
        }
        for name, action in ((A, "promote"), (B, "promote"), (A, "rollback"))
    ]
    assert [deployment.hook for deployment in store.metadata.deployments()] == ["done"] * 3


@pytest.mark.parametrize("command", ["false", "no-such-program-anywhere", "'unclosed", "sleep 5"])
def test_a_command_that_fails_runs_again(
    store: Workspace, model: dict[str, str], command: str, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    logging.getLogger("posttrain").propagate = True
    deployment = ModelRegistry(store, DeployConfig(command=command, timeout=0.2)).promote(model[A], round=0)
    assert deployment.hook == "failed"
    assert champion_name(store) == A
    assert "deploy.command" in caplog.text
    registry = ModelRegistry(store, hook(store.root, LOG_CALL))
    registry.sync()
    registry.sync()
    assert [entry["POSTTRAIN_MODEL"] for entry in hook_calls(store)] == [model[A]]
    assert registry.champion is not None
    assert registry.champion.hook == "done"


def test_the_command_runs_after_a_kill(
    store: Workspace, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = hook(store.root, LOG_CALL)

    def die(*arguments: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.loop.model_registry.call", die)
        with pytest.raises(KeyboardInterrupt):
            ModelRegistry(store, hooks).promote(model[A], round=0)
    ModelRegistry(store, hooks).sync()
    assert len(hook_calls(store)) == 1


@pytest.fixture
def listener() -> Iterator[tuple[str, list[Any], list[int]]]:
    """A web server: its address, the requests to it, and the statuses of its next responses."""
    requests: list[Any] = []
    statuses: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(statuses.pop(0) if statuses else 200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", requests, statuses
    server.shutdown()
    server.server_close()


def test_a_webhook_is_called_until_it_succeeds(
    store: Workspace, model: dict[str, str], listener: tuple[str, list[Any], list[int]]
) -> None:
    address, requests, statuses = listener
    statuses += [500, 404]
    registry = ModelRegistry(store, DeployConfig(webhook=address))
    assert registry.promote(model[A], round=2, reason="better").hook == "failed"
    registry.sync()
    registry.sync()
    registry.sync()
    assert len(requests) == 3
    assert registry.champion is not None
    assert registry.champion.hook == "done"
    body = {
        "model": model[A],
        "action": "promote",
        "round": 2,
        "reason": "better",
        "path": str(store.champion_path),
    }
    assert requests == [("application/json", body)] * 3


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/", "http://127.0.0.1:port/", "https://"])
def test_an_unreachable_webhook_fails_the_hook_but_not_the_deployment(
    store: Workspace, model: dict[str, str], address: str
) -> None:
    assert ModelRegistry(store, DeployConfig(webhook=address, timeout=2)).promote(model[A], round=0).hook == "failed"
    assert champion_name(store) == A


@pytest.mark.parametrize("address", ["no address", "ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_a_webhook_must_be_a_web_address(address: str) -> None:
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
