"""The loop over HTTP: its state, its models, promotion and rollback."""

from pathlib import Path
from typing import Any

import pytest

from posttrain.loop.model_registry import ModelRegistry
from posttrain.store.files import hold_lock


def test_a_workspace_without_rounds_has_a_state_and_no_models(server: Any) -> None:
    viewer, owner = server.program("viewer"), server.program("owner")
    assert viewer.get("/api/status").json() | {"rounds_wanted": 0} == {
        "round": None,
        "rounds_wanted": 0,
        "champion": None,
        "waiting": None,
        "rounds": [],
        "final": None,
        "rollback": None,
        "canary": None,
    }
    assert viewer.get("/api/models").json() == viewer.get("/api/deployments").json() == []
    answer = owner.post("/api/models/promote", json={"model": "model-x", "confirm": "model-x"})
    assert (answer.status_code, answer.json()) == (404, {"error": "`model-x` is not a model of this workspace"})
    answer = owner.post("/api/models/rollback", json={"confirm": "model-x"})
    assert (answer.status_code, answer.json()["error"][:35]) == (409, "there is no earlier champion to rol")


def test_a_folder_of_datasets_has_no_loop(tmp_path: Path, make_server: Any) -> None:
    client = make_server(tmp_path / "data").program("owner")
    for method, path, body in (
        ("GET", "/status", None),
        ("POST", "/models/promote", {"model": "m", "confirm": "m"}),
        ("POST", "/models/rollback", {"confirm": "m"}),
    ):
        answer = client.request(method, f"/api{path}", json=body)
        assert answer.status_code == 404
        assert "has no posttrain.yaml" in answer.json()["error"]
    assert client.get("/", headers={"Accept": "text/html"}, follow_redirects=False).status_code in (200, 303)


@pytest.mark.slow
def test_an_owner_promotes_and_rolls_back_after_confirming(finished_copy: Path, make_server: Any) -> None:
    server = make_server(finished_copy)
    owner, registry = server.browser("owner"), ModelRegistry(server.site.workspace)
    models = {model["round"]: model["id"] for model in owner.get("/api/models").json()}
    state = owner.get("/api/status").json()
    champion = state["champion"]["id"]
    assert champion == models[2] == registry.champion_id
    assert [model["champion"] for model in owner.get("/api/models").json() if model["id"] == champion] == [True]

    answer = owner.post("/api/models/promote", json={"model": models[1], "confirm": models[2]})
    assert answer.status_code == 409
    assert registry.champion_id == models[2]
    with hold_lock(server.site.workspace.home / "loop.lock"):  # as a run does for hours
        answer = owner.post("/api/models/promote", json={"model": models[1], "confirm": models[1], "reason": "calmer"})
    assert (answer.status_code, answer.json()["reason"]) == (200, "calmer (owner)")
    assert registry.champion_id == models[1]
    assert server.site.workspace.champion_path.resolve().name == models[1]

    answer = owner.post("/api/models/rollback", json={"confirm": models[2]})
    assert answer.status_code == 409
    assert models[1] in answer.json()["error"]
    answer = owner.post("/api/models/rollback", json={"confirm": models[1]})
    assert answer.json() == {"source": models[1], "target": models[2], "done": False}
    again = owner.post("/api/models/rollback", json={"confirm": models[1]})
    assert again.json() == {"source": models[1], "target": models[2], "done": True}
    assert registry.champion_id == models[2]

    entries = owner.get("/api/audit", params={"count": 2}).json()
    assert [(entry["action"], entry["before"], entry["after"]) for entry in entries] == [
        ("roll back", {"champion": models[1]}, {"champion": models[2]}),
        ("promote", {"champion": models[2]}, {"champion": models[1]}),
    ]
    assert [entry["action"] for entry in owner.get("/api/deployments").json()][-2:] == ["promote", "rollback"]


@pytest.mark.slow
def test_who_chooses_a_champion_at_the_same_time_is_refused_in_one_line(
    finished_copy: Path, make_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(finished_copy)
    models = {model["round"]: model["id"] for model in server.program("owner").get("/api/models").json()}
    lock = server.site.workspace.home / "deploy.lock"
    monkeypatch.setattr(type(server.site.workspace), "deploying", lambda self: hold_lock(lock))
    with hold_lock(lock):
        answer = server.program("owner").post("/api/models/promote", json={"model": models[1], "confirm": models[1]})
    assert answer.status_code == 409
    assert "another posttrain works in this workspace (process" in answer.json()["error"]
