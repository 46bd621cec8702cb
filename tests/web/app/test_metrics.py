"""``GET /metrics`` for Prometheus."""

import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from posttrain.loop.canary import judge_canary, start_canary
from posttrain.loop.model_registry import ModelRegistry
from posttrain.store.workspace import Workspace


def read(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_only_an_account_reads_the_metrics(server: Any) -> None:
    assert server.client().get("/metrics").status_code == 401
    answer = server.program("viewer").get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")


def test_every_family_has_a_sample_before_the_first_round(server: Any) -> None:
    values = read(server.program("viewer").get("/metrics").text)
    assert len(values) > 10
    assert [name for name, samples in values.items() if not samples] == []
    assert {name for (name,) in values["posttrain_loop_drift"]} >= {"psi", "mmd_p", "confidence"}
    assert all(math.isnan(value) for value in values["posttrain_loop_drift"].values())  # 0 would be a measurement
    assert values["posttrain_loop_canaries"][("running",)] == 0


@pytest.mark.slow
def test_a_canary_has_its_arms_outcomes_and_what_became_of_it(finished_copy: Path, make_server: Any) -> None:
    server = make_server(finished_copy)
    site = server.site
    model = site.workspace.metadata.rounds()[1].candidate
    canary = start_canary(site.workspace, site.config, model, 0.25, "try")
    bare = read(server.program("viewer").get("/metrics").text)
    assert set(bare["posttrain_loop_canary_outcomes"].values()) == {0}
    ratings = {canary.name: ["up", "up", "down"], canary.champion_name: ["down", "up", "up", "up"]}
    for arm, given in ratings.items():
        for at, rating in enumerate(given):
            body = {"id": f"{arm}-{at}", "prompt": "my card?", "completion": "cash", "rating": rating, "arm": arm}
            assert server.client().post("/v1/feedback", json=body).status_code == 201
    with Workspace.open(finished_copy, site.config.store) as workspace:
        judge_canary(workspace, site.config)
    values = read(server.program("viewer").get("/metrics").text)
    assert values["posttrain_loop_canary_share"] == {("canary",): 0.25, ("champion",): 0.75}
    assert values["posttrain_loop_canary_outcomes"] == {
        ("canary", "good"): 2,
        ("canary", "bad"): 1,
        ("champion", "good"): 3,
        ("champion", "bad"): 1,
    }
    assert values["posttrain_loop_canaries"][("running",)] == 1
    assert [name for name, samples in values.items() if not samples] == []
    with Workspace.open(finished_copy, site.config.store) as workspace:
        ModelRegistry(workspace, site.config.deploy).end_canary(canary.id, "rolled_back", "worse")
    ended = read(server.program("viewer").get("/metrics").text)
    assert ended["posttrain_loop_canary_share"] == {("canary",): 0, ("champion",): 1}
    assert (ended["posttrain_loop_canaries"][("running",)], ended["posttrain_loop_canaries"][("rolled_back",)]) == (
        0,
        1,
    )


def test_a_folder_of_datasets_has_no_metrics(tmp_path: Path, make_server: Any) -> None:
    assert make_server(tmp_path / "data").program("viewer").get("/metrics").text == ""


@pytest.mark.slow
def test_the_metrics_are_those_of_the_loop(finished_copy: Path, make_server: Any) -> None:
    server = make_server(finished_copy)
    values = read(server.program("viewer").get("/metrics").text)
    state = server.program("viewer").get("/api/status").json()
    assert values["posttrain_loop_round"] == {(): 2}
    assert values["posttrain_loop_labels"] == {(): 24}
    assert values["posttrain_loop_decisions"] == {("deploy",): 2, ("refuse",): 0, ("rollback",): 0}
    assert values["posttrain_loop_champion_metric"][("accuracy",)] == state["champion"]["metrics"]["accuracy"]
    assert values["posttrain_loop_champion_damaged"] == values["posttrain_loop_feedback_waiting"] == {(): 0}
    feedback = {"id": "1", "prompt": "my card?", "completion": "cash", "rating": "up"}
    assert server.client().post("/v1/feedback", json=feedback).status_code == 201
    assert read(server.program("viewer").get("/metrics").text)["posttrain_loop_feedback_waiting"] == {(): 1}
