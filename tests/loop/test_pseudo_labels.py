"""Pseudo-labels join a round's training with their weight, never the next round, and never a test record."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from word_embeddings import embed_words

from posttrain.data.records.record import assign_ids, records
from posttrain.loop.history import label_counts
from posttrain.loop.stages import pseudo
from posttrain.loop.stages.pseudo import pseudo_weights
from posttrain.loop.teachers import calibrated
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of
from posttrain.train.config import TrainConfig

OpenLoop = Any


@pytest.fixture(autouse=True)
def word_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    embed_words(monkeypatch)


def pseudo_labels(**settings: Any) -> dict[str, Any]:
    return {"per_round": 12, "embedder": "minilm", "pseudo": {"confidence": 0.3, **settings}}


def unsure_of_some(*arguments: Any) -> np.ndarray:
    """A teacher's confidences, a third of them too low and a third unknown."""
    confidence = np.array(calibrated(*arguments), np.float64)
    confidence[::3], confidence[1::3] = 0.1, np.nan
    return confidence


@pytest.fixture(scope="module")
def pseudo_workspace(begun_workspace: Path, small_anywhere: Any, loop_class: Any, build_once: Any) -> Path:
    """A workspace after two rounds that trained on pseudo-labels as well; read-only."""

    def build(folder: Path) -> None:
        shutil.copytree(begun_workspace, folder, symlinks=True)
        small_anywhere(folder.parent).configure(folder, label=pseudo_labels())
        with pytest.MonkeyPatch.context() as patch:
            embed_words(patch)
            patch.setattr(pseudo, "calibrated", unsure_of_some)
            loop = loop_class(folder)
            loop.run()
            loop.store.close()

    return Path(build_once("pseudo", build))


@pytest.fixture
def finished_pseudo_loop(pseudo_workspace: Path, open_loop: Callable[[Path], OpenLoop], tmp_path: Path) -> OpenLoop:
    return open_loop(Path(shutil.copytree(pseudo_workspace, tmp_path / "pseudo", symlinks=True)))


def table_at(loop: OpenLoop, id: str) -> pa.Table:
    return parquet.read_table(loop.store.artifacts.path(id) / "records.parquet")


def marks(table: pa.Table) -> list[dict[str, Any] | None]:
    return [json.loads(meta or "{}").get("pseudo") for meta in table["meta"].to_pylist()]


def test_pseudo_labels_are_marked_and_counted_and_gone_in_the_next_round(
    finished_pseudo_loop: OpenLoop,
) -> None:
    loop = finished_pseudo_loop
    for number in (1, 2):
        detail = loop.metadata.rounds()[number].detail
        mixed, own = table_at(loop, detail["outputs"]["pseudo"]), table_at(loop, detail["dataset"])
        assert own.num_rows == 12 * number
        assert marks(own) == [None] * own.num_rows
        # The labels of people are the first rows, unchanged.
        assert mixed.slice(0, own.num_rows).equals(own)
        added = marks(mixed.slice(own.num_rows))
        assert 0 < len(added) <= 8 * own.num_rows
        assert assign_ids(mixed).select(["id", "input_id"]).equals(mixed.select(["id", "input_id"]))
        assert all(mark and mark["teacher"] == "linear" and mark["confidence"] >= 0.3 for mark in added)
        meta = loop.store.artifacts.get(detail["outputs"]["pseudo"]).meta
        assert (meta["counts"]["records"], meta["pseudo"]["records"]) == (mixed.num_rows, len(added))
        train = loop.metadata.runs(stage="train", round=number)[-1]
        assert train.inputs["dataset"] == detail["outputs"]["pseudo"]
        # Afresh from this round's labels: the next round builds on those of people alone.
        assert detail["next_parent"] == detail["dataset"]
    assert label_counts(loop.store) == [0, 12, 24]


def test_without_pseudo_labels_every_artifact_before_training_is_the_same(
    small: Any, begun_loop: Callable[..., OpenLoop]
) -> None:
    plain, mixed = begun_loop("plain"), begun_loop("mixed", label=pseudo_labels())
    for loop in (plain, mixed):
        loop.run(1, until="pseudo")
    details = [loop.metadata.rounds()[1].detail for loop in (plain, mixed)]
    assert details[0]["dataset"] == details[1]["dataset"]
    assert details[0]["labelled"] == details[1]["labelled"]
    assert "output pseudo" not in details[0]
    keys = [[run.id for run in loop.metadata.runs() if run.stage not in ("pseudo", "head")] for loop in (plain, mixed)]
    assert len(keys[0]) == len(keys[1])
    # One key leaves them out again, in the middle of a round too.
    small.configure(mixed.root, label={"per_round": 12})
    mixed.run(1, until="train")
    train = mixed.metadata.runs(stage="train")[-1]
    assert train.inputs["dataset"] == details[0]["dataset"]


def test_a_test_record_or_near_duplicate_in_the_pool_is_never_a_pseudo_label(
    small: Any, begun_loop: Callable[..., OpenLoop]
) -> None:
    loop = begun_loop(
        data={"steps": ["exact", "conflicts", {"decontaminate": {"ngram": 4, "threshold": 0.6}}]},
        label={"per_round": 12, "embedder": "minilm", "pseudo": {"confidence": 0.0}},
    )
    test = small.rows()[60:80]
    leaked = [{"text": row["text"] + ending, "label": ""} for row in test for ending in ("", " now")]
    small.write(loop.root / "pool.csv", [*small.rows()[:60], *leaked], ["text"])
    loop.run(1, until="pseudo")
    mixed = table_at(loop, loop.metadata.rounds()[1].detail["outputs"]["pseudo"])
    texts = [prompt[-1]["content"] for prompt in mixed["prompt"].to_pylist()]
    assert len(texts) > 12
    for row in test:
        assert not any(text.startswith(row["text"]) for text in texts)


def test_the_dataset_stage_rejects_a_leak_that_only_the_answer_step_meets(
    small: Any, begun_loop: Callable[..., OpenLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pool is cleaned when it is collected; what slips through is caught when the pseudo-labels join.
    from posttrain.loop.stages import pseudo

    loop = begun_loop(label=pseudo_labels(confidence=0.0))
    test = small.rows()[60:64]
    leaked = table_of(*({"prompt": row["text"], "source": "leak", "line": 1} for row in test))
    free = pseudo.free_records
    monkeypatch.setattr(pseudo, "free_records", lambda *given: pa.concat_tables([free(*given), leaked]))
    loop.run(1, until="pseudo")
    detail = loop.metadata.rounds()[1].detail
    assert "leak" not in table_at(loop, detail["outputs"]["pseudo"])["source"].to_pylist()
    rejected = parquet.read_table(loop.store.artifacts.path(detail["outputs"]["pseudo"]) / "rejected.parquet")
    assert rejected["source"].to_pylist().count("leak") == 4


def test_the_weights_reach_the_loss(begun_loop: Callable[..., OpenLoop], monkeypatch: pytest.MonkeyPatch) -> None:
    """A training with weights is one with a column of the same weights."""
    from posttrain.train import stage as train_stage

    seen: list[tuple[pa.Table, Any]] = []
    train = train_stage.train

    def spy(source: Path, table: pa.Table, config: TrainConfig, *arguments: Any, **options: Any) -> Any:
        seen.append((table, options["weights"]))
        result = train(source, table, config, *arguments, **options)
        metas = [
            json.dumps({**json.loads(meta or "{}"), "w": weight})
            for meta, weight in zip(table["meta"].to_pylist(), options["weights"], strict=True)
        ]
        column = table.set_column(table.schema.get_field_index("meta"), "meta", pa.array(metas, pa.string()))
        other, scratch = options["out"].parent / "other", options["scratch"].parent / "other-scratch"
        other.mkdir()
        scratch.mkdir()
        options |= {"weights": None, "out": other, "scratch": scratch, "sink": None}
        expected = train(source, column, config.model_copy(update={"weight": "w"}), *arguments, **options)
        assert (result["first_loss"], result["last_loss"]) == (expected["first_loss"], expected["last_loss"])
        unweighted = train(source, table, config, *arguments, **{**options, "out": other, "scratch": scratch / "a"})
        assert unweighted["last_loss"] != result["last_loss"]
        return result

    monkeypatch.setattr(train_stage, "train", spy)
    loop = begun_loop(label=pseudo_labels(weight=0.25))
    loop.run(1, until="train")
    [(table, weights)] = seen
    assert weights.tolist() == [1.0 if mark is None else 0.25 for mark in marks(table)]


def test_labels_alone_have_no_weights() -> None:
    table = records([{"prompt": [{"role": "user", "content": "one"}], "completion": "loan"}])
    assert pseudo_weights(table) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"labels": None}, "label": {"pseudo": {}, "embedder": "minilm"}}, "closed label set"),
        ({"label": {"pseudo": {}, "embedder": None}}, "label.embedder: the linear head needs"),
        ({"label": {"pseudo": {"teacher": "endpoint"}}}, "label.endpoint: the teacher `endpoint` needs a server"),
        ({"label": {"pseudo": {"teacher": "champion"}}, "train": {"objective": "dpo"}}, "label.pseudo: `dpo`"),
        ({"label": {"suggest": "linear", "embedder": "./nowhere"}}, r"label.embedder: `\./nowhere`"),
    ],
)
def test_what_cannot_be_is_said_before_any_work(small: Any, changes: dict[str, Any], message: str) -> None:
    from posttrain.loop.config import load_config

    with pytest.raises(UserError, match=message):
        load_config(small(**changes))


def test_the_loop_says_what_the_head_alone_reaches_and_how_many_pseudo_labels_joined(
    finished_pseudo_loop: OpenLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    from posttrain.cli.main import app
    from posttrain.cli.show import show
    from posttrain.cli.status import status
    from posttrain.evaluate.suite import read_evaluation
    from posttrain.inspect.status import status as loop_status
    from posttrain.loop.config import load_config

    assert app is not None
    loop = finished_pseudo_loop
    last = loop_status(loop.store, load_config(loop.root))["rounds"][2]
    head = last["head"]
    # On the records that the candidate is measured on, and with the labels of people alone.
    evaluation = read_evaluation(loop.store.artifacts.path(loop.metadata.rounds()[2].detail["evaluation"]))
    assert (head["n"], head["labels"]) == (evaluation["test"].predictions.num_rows, 24)
    sentence = head["sentence"]
    assert sentence.startswith(f"A linear head on sentence embeddings reaches {head['accuracy']:.1%} (")
    assert sentence.endswith(f" with the same 24 labels; this model {last['metrics']['accuracy']:.1%}.")
    assert last["pseudo_labels"] > 0
    assert sentence in loop.page
    loop.store.close()
    status(loop.root)
    show("round 2", loop.root)
    printed = capsys.readouterr().out
    assert printed.count("A linear head on sentence embeddings reaches") == 2
    assert f"{last['pseudo_labels']} pseudo-labels of a model joined its training" in printed


def test_a_sentence_model_that_cannot_be_used_stops_no_round(
    begun_loop: Callable[..., OpenLoop], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from posttrain.inspect.show import show
    from posttrain.inspect.status import status
    from posttrain.loop import scoring
    from posttrain.loop.config import load_config

    for name in ("head_embedder", "sentence_embeddings"):
        monkeypatch.setattr(f"posttrain.loop.linear_head.{name}", getattr(scoring, name))
    folder = tmp_path / "embedder"
    loop = begun_loop(label={"per_round": 12, "embedder": str(folder)})
    loop.run(1, until="evaluate")
    assert "is not an embedder" in status(loop.store, load_config(loop.root))["rounds"][1]["latest"]["evaluate"][0]
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_text('{"model_type": "bert"}')
    loop.run(1)
    before, entry = status(loop.store, load_config(loop.root))["rounds"]
    (sentence,) = entry["latest"]["evaluate"]
    # Round 0 has no labels to learn from.
    assert ("evaluate" in before["latest"], entry["head"]) == (False, None)
    assert sentence.startswith("No linear head was measured: ")
    assert "model.safetensors" in sentence
    assert loop.page.count("No linear head was measured") == 1
    assert show(loop.store, "round 1")["latest"]["evaluate"] == [sentence]
