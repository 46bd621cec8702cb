"""Models that label in a round: what is accepted, what people see, what an endpoint is asked, and after a kill."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from word_embeddings import embed_words

from posttrain.inspect.status import status
from posttrain.loop.config import load_config
from posttrain.loop.label_reports import label_reports
from posttrain.loop.stages.select import batch_size
from posttrain.loop.stages.suggest import SUGGESTIONS

OpenLoop = Any

HEAD = {"embedder": "minilm"}


@pytest.fixture(autouse=True)
def word_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    embed_words(monkeypatch)


def suggestions_in(loop: OpenLoop, round: int) -> list[dict[str, Any]]:
    id = loop.metadata.rounds()[round].detail["outputs"]["suggest"]
    rows: list[dict[str, Any]] = parquet.read_table(loop.store.artifacts.path(id) / SUGGESTIONS).to_pylist()
    return rows


def labels_in(loop: OpenLoop, round: int) -> dict[str, tuple[str, str]]:
    """Label and annotator by the record's id."""
    table = parquet.read_table(
        loop.store.artifacts.path(loop.metadata.rounds()[round].detail["labelled"]) / "labels.parquet"
    )
    return {
        row["id"]: (row["completion"], json.loads(row["meta"])["labelled_by"]["annotator"])
        for row in table.select(["id", "completion", "meta"]).to_pylist()
    }


LABEL = {
    **{"per_round": 20, "suggest": "linear", "accept_error": 0.3, "pseudo": {"confidence": 0.3}},
    **HEAD,
}


@pytest.fixture(scope="module")
def suggesting_workspaces(begun_workspace: Path, small_anywhere: Any, loop_class: Any, build_once: Any) -> Path:
    """A folder with a workspace whose model suggests labels, ``first`` after round 1 and ``second`` after round 2."""

    def build(folder: Path) -> None:
        root = Path(shutil.copytree(begun_workspace, folder / "second", symlinks=True))
        small_anywhere(folder).configure(root, label=LABEL)
        with pytest.MonkeyPatch.context() as patch:
            embed_words(patch)
            for number in (1, 2):
                loop = loop_class(root)
                loop.run(number)
                loop.store.close()
                if number == 1:
                    shutil.copytree(root, folder / "first", symlinks=True)

    return Path(build_once("suggesting", build))


@pytest.fixture
def suggesting(
    suggesting_workspaces: Path, small: Any, open_loop: Callable[[Path], OpenLoop]
) -> Callable[..., OpenLoop]:
    """Opens the loop of a copy of one of `suggesting_workspaces`; takes changes of its section ``label``."""

    def open_copy(name: str, **label: Any) -> OpenLoop:
        root = Path(shutil.copytree(suggesting_workspaces / name, small.folder / name, symlinks=True))
        small.configure(root, label={**LABEL, **label})
        return open_loop(root)

    return open_copy


def test_what_is_sure_is_accepted_and_a_part_of_it_checked(suggesting: Callable[..., OpenLoop]) -> None:
    loop = suggesting("second")
    assert not any(row["accepted"] for row in suggestions_in(loop, 1))
    rows, labels = suggestions_in(loop, 2), labels_in(loop, 2)
    accepted = [row for row in rows if row["accepted"]]
    checked = [row for row in accepted if row["checked"]]
    assert len(accepted) >= 4
    assert len(checked) == max(1, round(0.1 * len(accepted)))
    for row in rows:
        by_model = row["accepted"] and not row["checked"]
        assert labels[row["id"]][1] == ("model:linear" if by_model else "oracle")
        assert not by_model or labels[row["id"]][0] == row["answer"]
    first, second = label_reports(loop.store)
    assert "too few" in first["models"]["acceptance"]["why"]
    models = second["models"]
    assert (models["accepted"], models["checked"]) == (len(accepted), len(checked))
    assert models["wrong"] == sum(labels[row["id"]][0] != row["answer"] for row in checked)
    assert models["low"] <= models["error"] <= models["high"]
    [reason, found] = models["sentences"]
    assert reason == f"{len(accepted)} answers of linear were accepted; {models['acceptance']['why']}"
    assert found.startswith(f"people found {models['wrong']} of {len(checked)} checked ones wrong: an error of ")
    # The same stands in status and the report.
    assert status(loop.store, load_config(loop.root))["rounds"][2]["models"] == models
    assert loop.page.count("People found") == 1
    assert "nothing is accepted: " in loop.page
    # People were asked for fewer, and the budget counts only them.
    assert second["annotators"] == {
        "model:linear": len(accepted) - len(checked),
        "oracle": 20 - len(accepted) + len(checked),
    }


def test_labels_of_models_cost_no_budget_and_teach_no_head(suggesting: Callable[..., OpenLoop]) -> None:
    from posttrain.loop.context import RoundContext
    from posttrain.loop.linear_head import fit_head

    loop = suggesting("second", budget=50)
    by_model = sum(annotator == "model:linear" for _, annotator in labels_in(loop, 2).values())
    assert by_model
    context = RoundContext(loop.store, load_config(loop.root), 3)
    assert batch_size(context) == min(20, 50 - 40 + by_model)
    head = fit_head(context, loop.metadata.rounds()[2].detail["dataset"])
    assert loop.store.artifacts.get(str(head)).meta["records"] == 40 - by_model


def test_records_drawn_at_random_stay_with_people(suggesting: Callable[..., OpenLoop]) -> None:
    loop = suggesting("second")
    selection = loop.metadata.rounds()[2].detail["selection"]
    batch = parquet.read_table(loop.store.artifacts.path(selection) / "batch.parquet").to_pylist()
    drawn = {row["id"] for row in batch if row["inclusion"] is not None}
    rows = suggestions_in(loop, 2)
    assert drawn
    assert not any(row["accepted"] for row in rows if row["id"] in drawn)


def fill(root: Path, round: int, label_of: dict[str, str]) -> list[dict[str, str]]:
    """Fills the round's CSV file; returns its rows as they were."""
    path = root / "labels" / f"round-{round}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([{**row, "label": label_of[row["prompt"]]} for row in rows])
    return rows


def test_people_get_the_rest_and_do_not_see_what_they_check(small: Any, suggesting: Callable[..., OpenLoop]) -> None:
    loop = suggesting("first", annotator="people")
    label_of = {row["text"]: row["label"] for row in small.rows()}
    waits = str(loop.run())
    rows = {row["id"]: row for row in suggestions_in(loop, 2)}
    open_rows = [row for row in rows.values() if not row["accepted"] or row["checked"]]
    assert 0 < len(open_rows) < 20
    assert f"({len(open_rows)} records)" in waits
    # As long as people label, nothing is suggested again.
    runs = len(loop.metadata.runs(stage="suggest"))
    loop.run()
    assert len(loop.metadata.runs(stage="suggest")) == runs
    shown = fill(loop.root, 2, label_of)
    assert {row["id"] for row in shown} == {row["id"] for row in open_rows}
    for row in shown:
        assert row["suggestion"] == ("" if rows[row["id"]]["checked"] else rows[row["id"]]["answer"])
    loop.run(until="label")
    assert len(labels_in(loop, 2)) == 20


def answer_by_word(labels: tuple[str, ...]) -> Callable[[list[dict[str, str]]], str]:
    def answer(messages: list[dict[str, str]]) -> str:
        text = messages[-1]["content"]
        return "I am not sure." if "odd" in text.split() else next(label for label in labels if label in text.split())

    return answer


def test_an_endpoint_labels_and_people_get_what_it_cannot(
    small: Any, begun_loop: Callable[..., OpenLoop], endpoint: Any
) -> None:
    endpoint.answer = answer_by_word(small.labels)
    endpoint.faults = [429]
    server = {"base_url": endpoint.url, "model": "m", "prices": [1.0, 0.0], "budget": 1.0}
    label_of = {row["text"]: row["label"] for row in small.rows()}
    loop = begun_loop(rounds=1, label={"annotator": "endpoint", "endpoint": server, "per_round": 40})
    loop.run()
    rows = fill(loop.root, 1, label_of)
    assert rows
    assert all("odd" in row["prompt"].split() for row in rows)
    asked = len(endpoint.requests)
    loop.run(until="dataset")
    labels = labels_in(loop, 1)
    assert len(labels) == 40
    assert {annotator for _, annotator in labels.values()} == {"model:endpoint", "file"}
    assert label_reports(loop.store)[0]["models"]["unanswered"] == len(rows)
    # No request twice: the batch was asked once, whatever ran again, and no label was there to check it on.
    prompts = [json.dumps(request["messages"]) for request in endpoint.requests]
    assert len(prompts) == len(set(prompts)) == asked == 40


def test_a_vote_suggests_with_a_measured_confidence(
    small: Any, begun_loop: Callable[..., OpenLoop], endpoint: Any
) -> None:
    endpoint.answer = answer_by_word(small.labels)
    server = {"base_url": endpoint.url, "model": "m"}
    label = {
        "suggest": "vote",
        "endpoint": server,
        "per_round": 30,
        **HEAD,
    }
    loop = begun_loop(label=label)
    loop.run(1)
    loop.run(until="suggest")
    first, later = suggestions_in(loop, 1), suggestions_in(loop, 2)
    # One model alone has no second vote to agree with, and no labelled record says how often it is right.
    assert {row["confidence"] for row in first} == {None}
    answered = [row for row in later if row["answer"] is not None]
    assert all(row["confidence"] is not None and 0 <= row["confidence"] <= 1 for row in answered)
    assert not any(row["accepted"] for row in later)


def test_a_kill_in_between_ends_in_the_same_artifacts(
    suggesting: Callable[..., OpenLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.loop.stages import pseudo, suggest

    def kill(*arguments: Any) -> np.ndarray:
        raise KeyboardInterrupt

    whole, killed = suggesting("second"), suggesting("first")
    for module in (suggest, pseudo):
        with monkeypatch.context() as patch:
            patch.setattr(module, "calibrated", kill)
            with pytest.raises(KeyboardInterrupt):
                killed.run()
    killed.run()
    details = [loop.metadata.rounds()[2].detail for loop in (whole, killed)]
    for key in ("outputs", "labelled", "dataset"):
        assert details[0][key] == details[1][key]
    assert whole.champion == killed.champion
