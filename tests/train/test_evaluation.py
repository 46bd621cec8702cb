"""Evaluation during training: exact, without a trace in the training, and early stopping on it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.held_out import HeldOutScore, held_out_score
from posttrain.evaluate.suite import run_suite
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.parallel.mesh import Mesh
from posttrain.store.errors import UserError
from posttrain.train import stage
from posttrain.train.callbacks import CallbackList, TrainingStopped
from posttrain.train.config import EvaluationConfig, TrainConfig
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import PhaseConfig
from posttrain.train.evaluation import Evaluation, HeldOut, held_out_rows
from posttrain.train.objectives.base import Objective
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK, PERPLEXITY = TaskConfig(max_new_tokens=4), SuiteConfig(scorer="perplexity")


def with_rejected(records: pa.Table) -> pa.Table:
    index = records.schema.get_field_index("rejected")
    return records.set_column(index, records.schema.field(index), [["no"] * records.num_rows])


class DrawingScore(HeldOutScore):
    """Scores that draw random numbers."""

    def __call__(self, model: LanguageModel, records: pa.Table) -> dict[str, float]:
        torch.rand(3)
        return super().__call__(model, records)


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tiny_model: Path, records: pa.Table, checkpointed: TrainConfig, tmp_path: Path) -> Run:
    """``run(name, held_out, **settings)``: trains into ``tmp_path / name``."""

    def call(
        name: str,
        held_out: HeldOut | None = None,
        *,
        stop_at: int | None = None,
        difficulties: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        config = TrainConfig.read(checkpointed.model_dump() | {"micro_batch_tokens": 4096} | changes, "here")
        pairs = config.spec.shape in ("pair", "labelled")
        return train(
            tiny_model,
            with_rejected(records) if pairs else records,
            config,
            TASK,
            seed=3,
            out=tmp_path / name,
            scratch=tmp_path / f"{name}-scratch",
            callbacks=CallbackList(lambda step: step.step + 1 == stop_at),
            held_out=held_out,
            difficulties=difficulties,
            weights=weights,
        )

    return call


def steps(folder: Path) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads((folder / "training.json").read_text())
    return result


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"noise": {"dropout": 0.1}, "precision": "bfloat16", "max_steps": 4},
        {"method": "lora", "lora": {"rank": 4, "dropout": 0.1}, "max_steps": 4},
        {"objective": {"name": "kto"}, "noise": {"neftune": 5.0}, "max_steps": 4},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_a_training_ends_in_the_same_bytes_with_evaluation(
    settings: dict[str, Any], run: Run, make_records: Any, tmp_path: Path
) -> None:
    held_out = make_records([("where is it", "refund"), ("my card", "card lost"), ("hi", "x")])
    if "objective" in settings:
        held_out = with_rejected(held_out)
    score = DrawingScore(["exact_match", "perplexity"], TASK)
    run("without", **settings)
    evaluate = {"data": "held-out.jsonl", "every": 2, "metrics": ["exact_match", "perplexity"]}
    summary = run("with", HeldOut(held_out, score), **settings, evaluate=evaluate)
    assert weights(tmp_path / "without") == weights(tmp_path / "with")
    lines = steps(tmp_path / "with")
    evaluations = [step.pop("evaluation", None) for step in lines]
    assert lines == steps(tmp_path / "without")
    assert [evaluation is not None for evaluation in evaluations] == [False, True] * (len(lines) // 2)
    assert summary["evaluation"] == {"steps": len(lines), **evaluations[-1]}
    assert {"loss", "exact_match/accuracy", "perplexity/perplexity"} <= evaluations[-1].keys()
    # What was measured last is what was written, but for the rounding of its file.
    result = run_suite(load_language_model(tmp_path / "with", TASK, "float32"), held_out, PERPLEXITY, "test")
    written, measured = result.metrics["perplexity"], evaluations[-1]["perplexity/perplexity"]
    assert math.log(measured) == pytest.approx(math.log(written), rel=2e-3)


def test_the_loss_is_the_mean_over_the_supervised_tokens_of_all_records(
    tiny_model: Path, records: pa.Table, config: TrainConfig, fresh: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    lm = fresh()
    evaluation = Evaluation.build(lm, str(tiny_model), HeldOut(records), config, TaskConfig(), tmp_path)
    evaluation.prepare(lm, tmp_path, padded=True, attention="sdpa")
    random = torch.get_rng_state()
    losses = [evaluation.measure(1, lm, [], tokens, Mesh.single())["loss"] for tokens in (64, 4096)]
    assert torch.equal(torch.get_rng_state(), random)
    assert lm.model.training
    lm.model.eval()
    total = count = 0.0
    for (unit,) in evaluation.units:
        ids, supervised = torch.tensor([unit.ids]), torch.tensor(unit.supervised[1:])
        with torch.no_grad():
            log_probs = lm.model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        total -= float(log_probs.gather(1, ids[0, 1:, None])[supervised].sum())
        count += int(supervised.sum())
    assert losses == pytest.approx([total / count] * 2, rel=1e-5)


@pytest.fixture
def opposed(records: pa.Table) -> HeldOut:
    """Held-out records with other answers than those that are learned, so that their loss soon rises."""
    index = records.schema.get_field_index("completion")
    answers = ["zzz q", *["quux v"] * (records.num_rows - 1)]
    return HeldOut(records.set_column(index, records.schema.field(index), [answers]))


STOPPING = {
    "epochs": 12,
    "learning_rate": 1e-2,
    "schedule": {"name": "constant", "warmup": 0},
    "evaluate": {"data": "held-out.jsonl", "every": 1, "patience": 3},
}


def test_early_stopping_keeps_the_weights_of_the_best_evaluation(run: Run, opposed: HeldOut, tmp_path: Path) -> None:
    summary = run("stopped", opposed, **STOPPING)
    losses = [step["evaluation"]["loss"] for step in steps(tmp_path / "stopped")]
    best = int(np.argmin(losses)) + 1
    assert len(losses) == summary["steps"] == best + 3 < 36
    assert summary["evaluation"] == {"steps": best, "loss": losses[best - 1]}
    # Without a decay of the rate, the training of so many steps is the same.
    run("short", **{**STOPPING, "evaluate": {}, "max_steps": best})
    assert weights(tmp_path / "stopped") == weights(tmp_path / "short")
    assert (tmp_path / "stopped-scratch" / "checkpoints" / f"step-{best:09d}").is_dir()


def test_a_stopped_training_resumes_to_the_same_best(run: Run, opposed: HeldOut, tmp_path: Path) -> None:
    # Few checkpoints: some evaluations are repeated, and the best is older than the last checkpoints that are kept.
    settings = STOPPING | {"checkpoint": {"every_seconds": None, "every_steps": 2, "keep_last": 1}}
    expected = run("whole", opposed, **settings)
    for at in (1, expected["evaluation"]["steps"] + 1, expected["steps"] - 1):
        with pytest.raises(TrainingStopped):
            run("resumed", opposed, **settings, stop_at=at)
    assert run("resumed", opposed, **settings) == expected
    assert weights(tmp_path / "whole") == weights(tmp_path / "resumed")
    assert steps(tmp_path / "whole") == steps(tmp_path / "resumed")


def test_a_share_is_taken_from_the_training_records(run: Run, records: pa.Table, tmp_path: Path) -> None:
    summary = run("share", HeldOut(), evaluate={"data": 0.2})
    rows = held_out_rows(records, 0.2, 3)
    assert rows.sum() == 2
    assert summary["examples"] == 8
    assert [bool(step.get("evaluation")) for step in steps(tmp_path / "share")] == [False, True] * 2


def test_held_out_records_are_drawn_with_their_groups_whatever_their_order(make_records: Any) -> None:
    table = make_records([(f"prompt {number}", "x") for number in range(60)])
    groups = [None if number % 3 else f"user {number % 12}" for number in range(60)]
    index = table.schema.get_field_index("group")
    table = table.set_column(index, table.schema.field(index), [groups])
    rows = held_out_rows(table, 0.25, 1)
    assert 15 <= rows.sum() < 20
    drawn = dict(zip(table["id"].to_pylist(), rows.tolist(), strict=True))
    order = np.random.default_rng(0).permutation(60)
    shuffled = table.take(pa.array(order))
    again = held_out_rows(shuffled, 0.25, 1)
    assert dict(zip(shuffled["id"].to_pylist(), again.tolist(), strict=True)) == drawn
    for group in {group for group in groups if group}:
        assert len({held for held, own in zip(rows.tolist(), groups, strict=True) if own == group}) == 1
    with pytest.raises(UserError, match="none can be held out"):
        held_out_rows(table.slice(0, 1), 0.25, 1)


def test_records_that_are_also_trained_on_are_counted(
    run: Run, records: pa.Table, caplog: pytest.LogCaptureFixture
) -> None:
    run("shared", HeldOut(records.slice(0, 4)), evaluate={"data": "held-out.jsonl"}, max_steps=1)
    assert "held out, and trained on too: 4 inputs" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evaluate": {"patience": 2}}, "there are no held-out records"),
        ({"evaluate": {"data": 1.5}}, "1.5 is not a share"),
        ({"evaluate": {"data": "150%"}}, "1.5 is not a share"),
        ({"max_steps": 3, "phases": [{"steps": 3}]}, "leave out max_steps"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig.read(values, "here")


@pytest.mark.parametrize(
    ("scorer", "message"),
    [("exact_mach", "did you mean `exact_match`"), ("regex", "settings of its own"), ("label_likelihood", "label set")],
)
def test_scorers_that_cannot_be_used_are_refused(scorer: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        held_out_score([scorer], TaskConfig())


def test_records_that_cannot_be_scored_are_refused_before_the_first_step(run: Run, make_records: Any) -> None:
    texts = HeldOut(make_records([("hi", "x"), (None, "a plain text")]), held_out_score(["exact_match"], TASK))
    with pytest.raises(UserError, match="f:2 has no prompt to answer"):
        run("texts", texts, stop_at=1, evaluate={"data": "texts.jsonl", "metrics": ["exact_match"]})


def test_a_forked_training_decides_by_its_new_metric_alone(run: Run, opposed: HeldOut, tmp_path: Path) -> None:
    scored = HeldOut(opposed.records, held_out_score(["perplexity"], TASK))
    with pytest.raises(TrainingStopped):
        run("forked", opposed, **STOPPING, stop_at=2)
    evaluate = STOPPING["evaluate"] | {"metrics": ["perplexity"]}
    summary = run("forked", scored, **{**STOPPING, "evaluate": evaluate, "max_steps": 4})
    measured = [step["evaluation"].get("perplexity/log_likelihood") for step in steps(tmp_path / "forked")]
    assert measured[:2] == [None, None]
    assert summary["evaluation"]["steps"] == 3 + int(np.argmax(measured[2:]))


@pytest.mark.parametrize(("metrics", "best"), [([], 2), (["exact_match"], 4)])
def test_the_first_of_equally_good_evaluations_is_the_best(metrics: list[str], best: int) -> None:
    config = EvaluationConfig(data=0.5, metrics=metrics, patience=2)
    losses, accuracies = [3.0, 1.0, 1.0, 2.0, 1.0], [0.1, 0.2, 0.2, 0.5, 0.5]
    lines: list[Any] = [
        SimpleNamespace(evaluation={"loss": loss, "exact_match/accuracy": accuracy, "exact_match/invalid_rate": 0.0})
        for loss, accuracy in zip(losses, accuracies, strict=True)
    ]
    evaluation = Evaluation(config, Objective, 1)  # type: ignore[arg-type]
    assert evaluation.best(lines) == best
    assert [evaluation.stops(lines[:done]) for done in range(6)] == [done >= best + 2 for done in range(6)]


def test_records_without_what_a_scorer_compares_are_refused_before_the_training(make_records: Any) -> None:
    records = make_records([("hi", None), ("hello", "x")])
    with pytest.raises(UserError, match="has no answer to compare with"):
        HeldOutScore(["exact_match"], TASK).check(records)
    HeldOutScore(["exact_match"], TASK).check(records.slice(1))


def test_the_last_step_is_evaluated_too() -> None:
    def due(**settings: Any) -> list[int]:
        evaluation = Evaluation(EvaluationConfig(data=0.5, **settings), Objective, 1)  # type: ignore[arg-type]
        sampler = BatchSampler(5, 2, 0, [PhaseConfig(steps=7)])
        return [done for done in range(1, 8) if evaluation.is_due(done, sampler)]

    assert due(every=3) == [3, 6, 7]
    assert due() == [3, 6, 7], "each epoch of three steps"


def test_values_of_records_stay_with_them_where_others_are_held_out(
    run: Run, records: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, tables = stage.read_training_set, []

    def recorded(source: str, table: pa.Table, config: Any, task: Any, scratch: Path, *values: Any) -> Any:
        tables.append((table["id"].to_pylist(), values))
        return read(source, table, config, task, scratch, *values)

    monkeypatch.setattr(stage, "read_training_set", recorded)
    difficulties = np.arange(records.num_rows, dtype=float)
    evaluate = {"data": 0.4}
    run("out", HeldOut(), evaluate=evaluate, max_steps=1, difficulties=difficulties, weights=difficulties + 1)
    (ids, values), *_ = tables
    rows = [records["id"].to_pylist().index(id) for id in ids]
    assert 0 < len(rows) < records.num_rows
    assert rows != list(range(len(rows)))
    assert [column.tolist() for column in values] == [rows, [row + 1 for row in rows]]
