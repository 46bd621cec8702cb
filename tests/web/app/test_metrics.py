"""``GET /metrics`` for Prometheus."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families


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
