"""Whole rounds with the tiny model: stages, reuse of finished work, and results."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.loop.config import load_config
from posttrain.loop.context import RoundContext
from posttrain.loop.stage import Stage
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

ROUND = ["drift", "score", "select", "label", "dataset", "train", "evaluate", "latency", "decide"]
BASELINE = ["collect pool", "collect test", "collect labelled", "fetch", "dataset", "evaluate", "latency"]
Open = Callable[[Path], Any]


def expected_stages(rounds: int, *, latency: bool = True) -> list[str]:
    later_stages = [f"{number} {stage}" for number in range(1, rounds + 1) for stage in ROUND]
    stages = [f"0 {stage}" for stage in BASELINE] + later_stages
    return [stage for stage in stages if latency or not stage.endswith("latency")]


def test_two_rounds_run_all_stages_and_grow_the_training_set(finished_loop: Any) -> None:
    loop = finished_loop
    # Nothing is evaluated twice: each candidate once, although it is the next round's champion.
    assert loop.stages() == expected_stages(2, latency=False)
    assert loop.stages("failed") == []
    rounds = loop.metadata.rounds()
    assert [entry.status for entry in rounds] == ["done"] * 3
    assert [entry.decision["action"] for entry in rounds] == ["baseline", "deploy", "deploy"]
    assert [entry.detail["labels"] for entry in rounds] == [0, 12, 24]
    assert loop.champion == rounds[2].candidate
    first, second = loop.labelled_inputs(1), loop.labelled_inputs(2)
    assert len(set(first)) == len(set(second)) == 12
    assert not set(first) & set(second)
    assert set(loop.trained_on(2)) == {*first, *second}
    assert [f"{artifact_name.name}@v{artifact_name.version}" for artifact_name in loop.metadata.names()] == [
        "labelled@v1",
        "pool@v1",
        "test@v1",
        "train@v1",
        "train@v2",
    ]


def test_a_second_run_does_nothing(copied_loop: Any, open_loop: Open) -> None:
    loop = copied_loop
    before = loop.metadata.runs(), loop.metadata.rounds(), loop.metadata.deployments()
    assert loop.run() is None
    assert open_loop(loop.root).run() is None
    assert (loop.metadata.runs(), loop.metadata.rounds(), loop.metadata.deployments()) == before


def test_more_rounds_resume_after_the_last_and_read_a_new_pool_file(small: Any, copied_loop: Any) -> None:
    loop = copied_loop
    before = loop.stages()
    loop.run(1)
    assert loop.stages() == before
    small.write(loop.root / "data" / "pool" / "more.csv", small.rows()[80:120], ["text"])
    loop.run(3)
    stages = loop.stages(after=len(before))
    assert stages[:3] == ["3 collect pool", "3 collect test", "3 collect labelled"]
    assert {stage.removeprefix("3 ") for stage in stages[3:]} == {stage for stage in ROUND if stage != "latency"}
    pool = loop.metadata.rounds()[3].detail["pool"]
    assert pool != loop.metadata.rounds()[2].detail["pool"]
    assert loop.metadata.artifact(pool).meta["counts"]["records"] == 100
    assert [f"{artifact_name.name}@v{artifact_name.version}" for artifact_name in loop.metadata.names("pool")] == [
        "pool@v1",
        "pool@v2",
    ]
    assert loop.metadata.artifact(loop.metadata.rounds()[3].detail["scores"]).meta["pool"] == 76


def test_a_changed_config_affects_only_the_open_round(small: Any, evaluated_loop: Callable[..., Any]) -> None:
    loop = evaluated_loop()
    stages_before = loop.stages()
    second, old_candidate = loop.metadata.rounds()[2], loop.metadata.runs(stage="train")[-1].output
    small.configure(loop.root, train={"epochs": 2}, label={"per_round": 9})
    loop.run(3)
    assert loop.metadata.rounds()[2] == second
    assert loop.stages(after=len(stages_before)) == [f"3 {stage}" for stage in ROUND[2:] if stage != "latency"]
    third = loop.metadata.rounds()[3]
    assert third.detail["labels"] == 33
    assert third.candidate != old_candidate


@pytest.mark.usefixtures("timed")
def test_a_run_that_stops_after_each_stage_ends_the_same_in_any_folder(
    small: Any, finished_loop: Any, open_loop: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "tiny").mkdir(parents=True)  # a folder with the model's name changes nothing
    (elsewhere / "tiny" / "x").write_text("x")
    monkeypatch.chdir(elsewhere)
    loop = open_loop(small("another/folder"))
    for until, rounds_done, last in (
        ("collect", 0, "0 collect labelled"),
        ("evaluate", 0, "0 latency"),
        ("deploy", 1, "0 latency"),
        ("score", 1, "1 score"),
        ("select", 1, "1 select"),
        ("label", 1, "1 label"),
        ("dataset", 1, "1 dataset"),
        ("train", 1, "1 train"),
        ("evaluate", 1, "1 latency"),
        ("decide", 1, "1 decide"),
        ("deploy", 2, "1 decide"),
    ):
        assert loop.run(until=until) is None
        assert loop.stages()[-1] == last
        assert [entry.status for entry in loop.metadata.rounds()].count("done") == rounds_done
    assert loop.stages() == expected_stages(1)
    # From one stage into the next round, and past the last round.
    for rounds_done in (3, 3):
        loop.run(until="deploy")
        assert [entry.status for entry in loop.metadata.rounds()] == ["done"] * rounds_done
    assert loop.stages() == expected_stages(2)
    assert loop.champion == finished_loop.champion
    assert loop.labelled_inputs(2) == finished_loop.labelled_inputs(2)
    for row, same_row in zip(loop.metadata.rounds(), finished_loop.metadata.rounds(), strict=True):
        metrics = {name: value for name, value in row.detail["metrics"].items() if "latency" not in name}
        assert metrics == same_row.detail["metrics"]
        assert row.candidate == same_row.candidate
    # A decision names the durations of the hook.
    ids = [
        {row.id for row in loop.metadata.artifacts() if row.kind not in ("decision", "latency")}
        for loop in (loop, finished_loop)
    ]
    assert ids[0] == ids[1]


def test_another_seed_gives_another_model(finished_loop: Any, begun_loop: Callable[..., Any]) -> None:
    loop = begun_loop(seed=18)
    loop.run(1, until="train")
    assert loop.metadata.runs(stage="train")[-1].output != finished_loop.metadata.rounds()[1].candidate


def test_an_unknown_stage_is_refused(begun_loop: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="--until: no stage `trian`; one of collect, drift, score"):
        begun_loop().run(until="trian")


def test_transformers_loads_the_champion(finished_loop: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loop = finished_loop
    tokenizer = AutoTokenizer.from_pretrained(loop.store.champion_path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(loop.store.champion_path, local_files_only=True)
    assert loop.store.champion_path.resolve().name == loop.champion
    turns = [{"role": "user", "content": "my card was lost"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert generated.shape[1] > ids["input_ids"].shape[1]
    base = AutoModelForCausalLM.from_pretrained(loop.store.artifacts.path(loop.metadata.rounds()[0].candidate))
    trained = dict(model.named_parameters())
    assert any((weight != trained[name]).any() for name, weight in base.named_parameters())


def test_at_the_end_the_champion_is_scored_on_all_test_records(small: Any, begun_loop: Callable[..., Any]) -> None:
    sampled = {"suites": {"test": {"sample": 8}}, "latency": {"prompts": 0}}
    loop = begun_loop(rounds=1, evaluate={**sampled, "final": False})
    loop.run()
    assert loop.status["final"] is None, "it is switched off"
    small.configure(loop.root, rounds=1, evaluate=sampled)
    loop.run()

    def prediction_count(evaluation: str) -> int:
        import pyarrow.parquet as parquet

        files = list(loop.store.artifacts.path(evaluation).rglob("*.parquet"))
        (predictions,) = [table for file in files if "predicted" in (table := parquet.read_table(file)).column_names]
        return int(predictions.num_rows)

    *others, last = loop.metadata.rounds()
    assert all("final" not in entry.detail for entry in others)
    assert prediction_count(last.detail["evaluation"]) == 8
    final = last.detail["final"]
    assert final["model"] == loop.champion
    assert prediction_count(final["evaluation"]) == 20
    assert loop.status["final"] == final
    # Another champion has another final evaluation.
    from posttrain.loop.model_registry import ModelRegistry

    ModelRegistry(loop.store).rollback()
    assert loop.status["final"] is None
    before = len(loop.stages())
    loop.run()
    assert loop.status["final"]["model"] == loop.champion != final["model"]
    assert loop.stages(after=before) == ["None evaluate"], "the final evaluation belongs to no round"


def test_metrics_of_the_first_suite_have_no_prefix(small: Any, begun_loop: Callable[..., Any]) -> None:
    suites = {"one": {"scorer": "label_likelihood"}, "two": {"scorer": "exact_match"}}
    loop = begun_loop()
    base = loop.metadata.rounds()[0]
    metrics = []
    for names in (("one", "two"), ("two", "one")):
        small.configure(loop.root, evaluate={"suites": {name: suites[name] for name in names}})
        context = RoundContext(loop.store, load_config(loop.root), 1, in_round=False)
        metrics.append(context.run(Evaluate(base.candidate, base.detail["test"])).meta["metrics"])
    assert next(iter(metrics[0])) == "accuracy"
    assert "one.accuracy" not in metrics[0]
    assert "two.accuracy" in metrics[0]
    assert "two.accuracy" not in metrics[1]
    assert "one.accuracy" in metrics[1]


def test_training_uses_labelled_files_from_round_one(small: Any, open_loop: Open) -> None:
    root = small(data={"labelled": ["labelled.csv"]})
    small.write(root / "labelled.csv", small.rows()[80:90])
    loop = open_loop(root)
    loop.run(1, until="dataset")
    assert [entry.detail["labels"] for entry in loop.metadata.rounds()] == [10, 22]
    small.write(root / "data" / "labelled" / "more.csv", small.rows()[90:95])
    loop.run(1, until="dataset")
    assert loop.metadata.rounds()[1].detail["labels"] == 27


def test_the_loop_waits_for_new_records_once_all_are_labelled(small: Any, begun_loop: Callable[..., Any]) -> None:
    sampled = {"suites": {"test": {"sample": 10}}, "latency": {"prompts": 0}}
    loop = begun_loop(train={"epochs": 1}, label={"per_round": 20}, evaluate=sampled)
    small.write(loop.root / "pool.csv", small.rows()[:18], ["text"])
    waits = loop.run()
    assert waits == "new inputs: every record of the pool is labelled (posttrain data add FILE)"
    assert [entry.detail.get("labels") for entry in loop.metadata.rounds()] == [0, 18, None]
    assert loop.status["waiting"] == waits
    # No further round may come: this may be the last champion.
    assert loop.status["final"]["model"] == loop.champion
    assert loop.run() == waits
    small.write(loop.root / "data" / "pool" / "more.csv", small.rows()[80:90], ["text"])
    assert loop.run(until="dataset") is None
    assert loop.metadata.rounds()[2].detail["labels"] == 28
    assert loop.status["waiting"] is None


def test_an_interrupted_round_resumes_at_its_stage(
    small: Any, finished_loop: Any, open_loop: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception after each stage, like a kill: no finished work is repeated."""
    loop = open_loop(small(rounds=1))
    run = RoundContext.run
    interrupted: set[str] = set()

    def run_then_interrupt(self: RoundContext, stage: Stage) -> Artifact:
        artifact = run(self, stage)
        if (key := f"{self.number} {stage.name}") not in interrupted:
            interrupted.add(key)
            raise KeyboardInterrupt(key)
        return artifact

    monkeypatch.setattr(RoundContext, "run", run_then_interrupt)
    interruptions = 0
    while True:
        try:
            loop.run()
            break
        except KeyboardInterrupt:
            interruptions += 1
    # Round 1 reuses its data and its base model.
    assert interruptions == len(interrupted) == len(expected_stages(1, latency=False)) + 4
    assert loop.stages() == expected_stages(1, latency=False)
    assert loop.champion == finished_loop.metadata.rounds()[1].candidate
    assert loop.labelled_inputs(1) == finished_loop.labelled_inputs(1)


def test_training_starts_from_the_base_model_or_the_champion(small: Any, copied_loop: Any) -> None:
    loop = copied_loop
    for train, source in (({"method": "lora", "lora": {"rank": 4}}, 0), ({"start": "champion"}, 2)):
        small.configure(loop.root, train={"epochs": 1, **train})
        loop.run(3, until="train")
        run = loop.metadata.runs(stage="train")[-1]
        assert (run.round, run.inputs["source"]) == (3, loop.metadata.rounds()[source].candidate)


@pytest.mark.usefixtures("timed")
def test_plain_text_is_scored_by_perplexity(small: Any, open_loop: Open) -> None:
    root = small(
        task={"labels": None, "max_new_tokens": 4},
        data={"pool": ["pool.jsonl"], "test": ["text.jsonl"], "labelled": ["more.jsonl"], "columns": None},
        label={"file": "answers.jsonl"},
        evaluate={"suites": {"text": {"scorer": "perplexity"}}, "latency": {"prompts": 2, "repeats": 1}},
        gate={"deploy": ["perplexity < champion.perplexity * 10"]},
    )
    texts = [row["text"] for row in small.rows()]
    for name, file_texts in (("text", texts[:10]), ("more", texts[10:30])):
        lines = [json.dumps({"text": f"{text}, they said"}) for text in file_texts]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    rows = [{"prompt": row["text"], "completion": row["label"]} for row in small.rows()[30:60]]
    (root / "answers.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (root / "pool.jsonl").write_text("\n".join(json.dumps({"prompt": row["prompt"]}) for row in rows))
    loop = open_loop(root)
    loop.run(1)
    assert loop.metadata.rounds()[1].decision["action"] == "deploy"
    assert {"perplexity", "latency_p99"} <= loop.metadata.rounds()[1].detail["metrics"].keys()


def fill_batch(path: Path, labels: Sequence[str]) -> None:
    """Fills in the label that stands in the text."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["label"] = next(label for label in labels if label in " ".join(row.values()))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_a_round_that_an_earlier_call_began_goes_on(small: Any, copied_loop: Any) -> None:
    loop = copied_loop
    small.configure(loop.root, label={"annotator": "people"})
    waiting = loop.run(3)
    assert waiting is not None
    assert "labels for round 3" in waiting
    # Without the option, which the waiting line does not name: the batch that is out is not dropped.
    assert "labels for round 3: 0 of 12 are filled in" in str(loop.run())
    fill_batch(loop.root / "labels" / "round-3.csv", small.labels)
    assert loop.run() is None
    assert [row.status for row in loop.metadata.rounds()] == ["done"] * 4
    runs = loop.stages()
    assert loop.run() is None
    assert loop.stages() == runs, "no further round begins by itself"
