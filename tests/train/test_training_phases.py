"""Trainings in phases and with curricula: their records, their learning rates, and resumption after a kill."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from posttrain.models import packing
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.decisions import MonitorDecision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
SCORES = [5, 3, 9, 0, 8, 1, 4, 2, 7, 6]
ADAPTIVE = {"name": "adaptive", "every": 2, "start": 0.3, "duration": 0.8}


class Killed(BaseException):
    """Stands for the death of the process."""


class StepSink:
    """A sink that keeps the values of the steps."""

    def __init__(self) -> None:
        self.steps: list[StepValues] = []

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        self.steps.append(values)

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        del self.steps[len(steps) :]

    def close(self) -> None: ...


@pytest.fixture
def scored_records(records: pa.Table) -> pa.Table:
    """The ten records with topics and scores."""
    meta = [json.dumps({"topic": "abcd"[row % 4], "score": score}) for row, score in enumerate(SCORES)]
    return records.set_column(records.schema.get_field_index("meta"), "meta", pa.array(meta))


@pytest.fixture
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of every micro-batch with a loss; here a step is one micro-batch."""
    result: list[list[int]] = []
    loss = SftObjective.loss

    def record_rows(self: SftObjective, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        result.append(list(rows))
        return loss(self, lm, packed, rows)

    monkeypatch.setattr(SftObjective, "loss", record_rows)
    return result


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def with_settings(config: TrainConfig, **changes: Any) -> TrainConfig:
    return TrainConfig.read(config.model_dump() | {"micro_batch_tokens": 4096} | changes, "here")


def test_phases_have_their_own_data_length_and_rate(
    tiny_model: Path, scored_records: pa.Table, config: TrainConfig, tmp_path: Path, rows_seen: list[list[int]]
) -> None:
    phases = [
        {"mix": {"a": 1, "b": 1}, "mix_by": "topic", "epochs": 2, "learning_rate": 1e-4},
        {"steps": 4},
        {"max_length": 40, "epochs": 1, "learning_rate": 1e-5},
    ]
    constant = {"name": "constant", "warmup": 0.0}
    sink = StepSink()
    meta = train(
        tiny_model,
        scored_records,
        with_settings(config, phases=phases, schedule=constant),
        TASK,
        seed=3,
        out=tmp_path / "out",
        scratch=tmp_path / "scratch",
        sink=sink,
    )
    # The two topics hold 3 records each, the ten make up three steps an epoch.
    counts = [0] * 10
    for row in (row for rows in rows_seen[:4] for row in rows):
        counts[row] += 1
    assert counts == [2, 2, 0, 0, 2, 2, 0, 0, 2, 2]
    assert sorted(row for rows in rows_seen[4:7] for row in rows) == list(range(10))
    short = [row for rows in rows_seen[8:] for row in rows]
    assert len(short) == len(set(short))
    assert 0 < len(short) < 10
    assert [step.lr for step in sink.steps] == [1e-4] * 4 + [config.learning_rate] * 4 + [1e-5] * (len(rows_seen) - 8)
    assert [step.epoch for step in sink.steps][:8] == [0, 0, 1, 1, 2, 2, 2, 3]
    topic_counts = {"records": 3, "met": 6, "epochs": 2.0, "fewest": 2, "most": 2}
    assert meta["mixes"] == [{"phase": 0, "by": "topic", "kinds": {"a": topic_counts, "b": topic_counts}}]
    assert meta["steps"] == len(rows_seen)


def test_a_fixed_curriculum_trains_on_easy_records_first(
    tiny_model: Path, scored_records: pa.Table, config: TrainConfig, tmp_path: Path, rows_seen: list[list[int]]
) -> None:
    curriculum = {"name": "fixed", "difficulty": "score", "start": 0.4, "duration": 0.5}
    train(
        tiny_model,
        scored_records,
        with_settings(config, phases=[{"epochs": 4, "curriculum": curriculum}]),
        TASK,
        seed=3,
        out=tmp_path / "out",
        scratch=tmp_path / "scratch",
    )
    assert sorted(SCORES[row] for row in rows_seen[0]) == [0, 1, 2, 3]
    hardest = [max(SCORES[row] for row in rows) for rows in rows_seen[:6]]
    assert all(score < 10 * math.sqrt(0.16 + 0.84 * step / 6) + 0.5 for step, score in enumerate(hardest))
    assert sorted(row for rows in rows_seen[6:9] for row in rows) == list(range(10))


def test_the_answers_of_a_pair_have_the_same_kind(
    tiny_model: Path, scored_records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    pairs = scored_records.set_column(
        scored_records.schema.get_field_index("rejected"), "rejected", pa.array(["no"] * 10)
    )
    phases = [{"mix": {"a": 1}, "mix_by": "topic", "epochs": 1}, {"steps": 1}]
    changes = {"objective": "kto", "batch_size": 2, "phases": phases}
    meta = train(
        tiny_model,
        pairs,
        with_settings(config, **changes),
        TASK,
        seed=3,
        out=tmp_path / "out",
        scratch=tmp_path / "scratch",
    )
    assert meta["steps"] == 4, "three records of two answers each, and another step"
    assert 5 <= len(meta["never_met"]) <= 7
    assert not {scored_records["id"][row].as_py() for row in (0, 4, 8)} & set(meta["never_met"])


def test_kills_do_not_change_a_curriculum(
    tiny_model: Path,
    scored_records: pa.Table,
    checkpointed: TrainConfig,
    tmp_path: Path,
    rows_seen: list[list[int]],
) -> None:
    config = with_settings(checkpointed, phases=[{"epochs": 3, "curriculum": ADAPTIVE}])

    def run(name: str) -> dict[str, Any]:
        torch.manual_seed(99)  # a new process has other generator states
        return train(
            tiny_model, scored_records, config, TASK, seed=3, out=tmp_path / name, scratch=tmp_path / f"{name}-scratch"
        )

    meta = run("whole")
    expected_rows = list(rows_seen)
    unused = set(range(10)) - {row for rows in expected_rows for row in rows}
    assert meta.get("never_met", []) == [scored_records["id"][row].as_py() for row in sorted(unused)]
    assert len({row for rows in expected_rows[:2] for row in rows}) < len(
        {row for rows in expected_rows for row in rows}
    )
    del rows_seen[:]
    for step in (1, 4, 5, meta["steps"] - 1):
        with pytest.MonkeyPatch.context() as patch:
            loss = SftObjective.loss

            def die(
                self: SftObjective,
                lm: LanguageModel,
                packed: Packed,
                rows: Sequence[int],
                *,
                original: Callable[..., Loss] = loss,
                after: int = step,
            ) -> Loss:
                if len(rows_seen) > after:
                    raise Killed
                return original(self, lm, packed, rows)

            patch.setattr(SftObjective, "loss", die)
            if step < meta["steps"] - 1:
                with pytest.raises(Killed):
                    run("parts")
            else:
                assert run("parts") == meta
    assert rows_seen == expected_rows
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": [{"steps": 3, "mix": {"z": 1}, "mix_by": "topic"}]}, "train.phases.0.mix: no record is of `z`"),
        (
            {"phases": [{"steps": 3, "mix": {"z": 1}, "mix_by": "tag"}]},
            "f:1: .* no `tag`; .* train.phases.0.mix_by",
        ),
        (
            {"phases": [{"steps": 3, "curriculum": ADAPTIVE | {"difficulty": "topic"}}]},
            "has no number `topic` but `a`",
        ),
        (
            {
                "phases": [
                    {"steps": 3, "curriculum": ADAPTIVE},
                    {"steps": 3, "curriculum": ADAPTIVE | {"difficulty": "score"}},
                ]
            },
            "the phases' curricula go by different difficulties",
        ),
        (
            {"phases": [{"steps": 3, "curriculum": ADAPTIVE}], "objective": "classification"},
            "train.phases.N.curriculum.difficulty: classification has no loss before training",
        ),
    ],
)
def test_impossible_phases_and_curricula_are_refused(
    tiny_model: Path,
    scored_records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    task = TaskConfig(labels=sorted(set(scored_records["completion"].to_pylist())))
    with pytest.raises(UserError, match=message):
        train(
            tiny_model,
            scored_records,
            with_settings(config, **changes),
            task,
            seed=3,
            out=tmp_path / "out",
            scratch=tmp_path / "scratch",
        )


def test_harder_records_are_no_explosion_beside_those_learned_by_heart(
    tiny_model: Path,
    scored_records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # All records open at once after half of the steps, when the easiest one is known by heart.
    curriculum = {"name": "adaptive", "start": 0.1, "target": 0.0, "every": 60, "difficulty": "score"}
    changes = {"batch_size": 1, "learning_rate": 1e-2, "phases": [{"steps": 100, "curriculum": curriculum}]}
    caplog.set_level("INFO", "posttrain")
    folders = {"out": tmp_path / "out", "scratch": tmp_path / "scratch"}
    sink = StepSink()
    train(tiny_model, scored_records, with_settings(config, **changes), TASK, seed=3, sink=sink, **folders)
    assert "all records are open, 10% before: the curriculum ends" in caplog.text
    norms = [step.grad_norm for step in sink.steps]
    assert max(after / before for before, after in pairwise(norms)) > 20, "of which the monitor says nothing"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_curriculum_does_not_depend_on_the_layout_of_rows(
    tiny_model: Path,
    scored_records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    rows_seen: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step uses the same records with packed rows, padded rows and rows of single records."""

    def rows_by_step(name: str, **changes: Any) -> list[list[int]]:
        run_config = with_settings(config, phases=[{"epochs": 3, "curriculum": ADAPTIVE}], **changes)
        del rows_seen[:]
        meta = train(
            tiny_model, scored_records, run_config, TASK, seed=3, out=tmp_path / name, scratch=tmp_path / f"{name}-s"
        )
        assert meta["steps"] == 9
        rows = [row for rows in rows_seen for row in rows]
        return [rows[start : start + 4] for start in range(0, 4 * 8, 4)]

    packed = rows_by_step("packed")
    assert len({row for rows in packed[:2] for row in rows}) <= 4, "four records are open at first"
    assert rows_by_step("single", micro_batch_tokens=1) == packed
    monkeypatch.setattr(packing, "has_full_attention", lambda *_: False)
    assert rows_by_step("padded") == packed


def test_the_loader_does_not_change_the_output(
    tiny_model: Path, scored_records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    expected = train(tiny_model, scored_records, config, TASK, seed=3, out=tmp_path / "plain", scratch=tmp_path / "s")
    for workers, prefetch in ((0, 1), (1, 3), (2, 1)):
        loader_config = with_settings(config, loader={"workers": workers, "prefetch": prefetch})
        out, scratch = tmp_path / f"{workers}", tmp_path / f"{workers}-s"
        assert train(tiny_model, scored_records, loader_config, TASK, seed=3, out=out, scratch=scratch) == expected
        assert contents(out) == contents(tmp_path / "plain")
