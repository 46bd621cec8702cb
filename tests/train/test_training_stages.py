"""Trainings in stages and with curricula: what they meet, at which rate, and that a kill changes nothing."""

import json
from collections.abc import Callable, Mapping, Sequence
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
from posttrain.train.monitor.decisions import Decision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.stage import train

pytestmark = pytest.mark.slow

TASK = TaskConfig(system="Name the intent.")
SCORES = [5, 3, 9, 0, 8, 1, 4, 2, 7, 6]
ADAPTIVE = {"name": "adaptive", "every": 2, "start": 0.3, "duration": 0.8}

SELF_PACED = {"name": "self_paced", "every": 2, "start": 0.4, "duration": 0.8, "growth": 1.02}


class Killed(BaseException):
    """Stands for the death of the process."""


class Heard:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepValues] = []

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        self.steps.append(values)

    def rewind(self, steps: Sequence[StepValues], sourced_records: Mapping[int, Sequence[Decision]]) -> None:
        del self.steps[len(steps) :]

    def close(self) -> None: ...


@pytest.fixture
def sourced_records(records: pa.Table) -> pa.Table:
    """The ten records of two topics, with a score each."""
    meta = [json.dumps({"topic": "abcd"[row % 4], "score": score}) for row, score in enumerate(SCORES)]
    return records.set_column(records.schema.get_field_index("meta"), "meta", pa.array(meta))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of every micro-batch that a loss is taken on; a step is one here."""
    result: list[list[int]] = []
    loss = SftObjective.loss

    def noted(self: SftObjective, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        result.append(list(rows))
        return loss(self, lm, packed, rows)

    monkeypatch.setattr(SftObjective, "loss", noted)
    return result


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def with_settings(config: TrainConfig, **changes: Any) -> TrainConfig:
    return TrainConfig.read(config.model_dump() | {"micro_batch_tokens": 4096} | changes, "here")


def test_stages_have_their_data_length_and_rate(
    tiny_model: Path, sourced_records: pa.Table, config: TrainConfig, tmp_path: Path, seen: list[list[int]]
) -> None:
    stages = [
        {"mix": {"a": 1, "b": 1}, "mix_by": "topic", "epochs": 2, "learning_rate": 1e-4},
        {"steps": 4},
        {"max_length": 40, "epochs": 1, "learning_rate": 1e-5},
    ]
    constant = {"name": "constant", "warmup": 0.0}
    heard = Heard()
    meta = train(
        tiny_model,
        sourced_records,
        with_settings(config, stages=stages, schedule=constant),
        TASK,
        seed=3,
        out=tmp_path / "out",
        scratch=tmp_path / "scratch",
        sink=heard,
    )
    # The two topics hold 3 records each, the ten make up three steps an epoch.
    counts = [0] * 10
    for row in (row for rows in seen[:4] for row in rows):
        counts[row] += 1
    assert counts == [2, 2, 0, 0, 2, 2, 0, 0, 2, 2]
    assert sorted(row for rows in seen[4:7] for row in rows) == list(range(10))
    short = [row for rows in seen[8:] for row in rows]
    assert len(short) == len(set(short))
    assert 0 < len(short) < 10
    assert [step.lr for step in heard.steps] == [1e-4] * 4 + [config.learning_rate] * 4 + [1e-5] * (len(seen) - 8)
    assert [step.epoch for step in heard.steps][:8] == [0, 0, 1, 1, 2, 2, 2, 3]
    twice = {"records": 3, "met": 6, "epochs": 2.0, "fewest": 2, "most": 2}
    assert meta["mixes"] == [{"stage": 0, "by": "topic", "kinds": {"a": twice, "b": twice}}]
    assert meta["steps"] == len(seen)


def test_easy_records_come_first(
    tiny_model: Path, sourced_records: pa.Table, config: TrainConfig, tmp_path: Path, seen: list[list[int]]
) -> None:
    curriculum = {"name": "fixed", "difficulty": "score", "start": 0.4, "duration": 0.5, "pacing": "step", "stairs": 1}
    train(
        tiny_model,
        sourced_records,
        with_settings(config, curriculum=curriculum, epochs=4),
        TASK,
        seed=3,
        out=tmp_path / "out",
        scratch=tmp_path / "scratch",
    )
    assert all(sorted(SCORES[row] for row in rows) == [0, 1, 2, 3] for rows in seen[:6])
    assert sorted(row for rows in seen[6:9] for row in rows) == list(range(10))


def test_the_answers_of_a_pair_are_of_one_kind(
    tiny_model: Path, sourced_records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    pairs = sourced_records.set_column(
        sourced_records.schema.get_field_index("rejected"), "rejected", pa.array(["no"] * 10)
    )
    stages = [{"mix": {"a": 1}, "mix_by": "topic", "epochs": 1}, {"steps": 1}]
    changes = {"objective": "kto", "batch_size": 2, "stages": stages}
    meta = train(
        tiny_model,
        pairs,
        with_settings(config, **changes),
        TASK,
        seed=3,
        out=tmp_path / "out",
        scratch=tmp_path / "scratch",
    )
    assert meta["steps"] == 4, "three records of two answers each, and one step more"
    assert 5 <= len(meta["never_met"]) <= 7
    assert not {sourced_records["id"][row].as_py() for row in (0, 4, 8)} & set(meta["never_met"])


@pytest.mark.parametrize(
    "curriculum", [ADAPTIVE, ADAPTIVE | {"difficulty": "score"}, SELF_PACED], ids=["loss", "score", "self_paced"]
)
def test_a_curriculum_that_is_killed_at_every_step(
    tiny_model: Path,
    sourced_records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    seen: list[list[int]],
    curriculum: dict[str, Any],
) -> None:
    config = with_settings(config, curriculum=curriculum, epochs=3)

    def again(name: str) -> dict[str, Any]:
        torch.manual_seed(99)  # a new process's generators stand anywhere
        return train(
            tiny_model, sourced_records, config, TASK, seed=3, out=tmp_path / name, scratch=tmp_path / f"{name}-scratch"
        )

    meta = again("whole")
    met = list(seen)
    left_out = set(range(10)) - {row for rows in met for row in rows}
    assert meta.get("never_met", []) == [sourced_records["id"][row].as_py() for row in sorted(left_out)]
    assert len({row for rows in met[:2] for row in rows}) < len({row for rows in met for row in rows})
    del seen[:]
    for step in range(meta["steps"]):
        with pytest.MonkeyPatch.context() as patch:
            loss = SftObjective.loss

            def dies(
                self: SftObjective,
                lm: LanguageModel,
                packed: Packed,
                rows: Sequence[int],
                *,
                own: Callable[..., Loss] = loss,
                after: int = step,
            ) -> Loss:
                if len(seen) > after:
                    raise Killed
                return own(self, lm, packed, rows)

            patch.setattr(SftObjective, "loss", dies)
            if step < meta["steps"] - 1:
                with pytest.raises(Killed):
                    again("parts")
            else:
                assert again("parts") == meta
    assert seen == met
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": [{"steps": 3, "mix": {"z": 1}, "mix_by": "topic"}]}, "train.stages.0.mix: no record is of `z`"),
        (
            {"stages": [{"steps": 3, "mix": {"z": 1}, "mix_by": "tag"}]},
            "f:1: .* no `tag`; .* train.stages.0.mix_by",
        ),
        ({"stages": [{"steps": 3}], "curriculum": ADAPTIVE}, "a training in stages has no curriculum of its own"),
        ({"curriculum": ADAPTIVE | {"difficulty": "topic"}}, "has no number `topic` but `a`"),
        (
            {
                "stages": [
                    {"steps": 3, "curriculum": ADAPTIVE},
                    {"steps": 3, "curriculum": ADAPTIVE | {"difficulty": "score"}},
                ]
            },
            "the stages' curricula go by different difficulties",
        ),
        (
            {"curriculum": ADAPTIVE, "objective": "classification"},
            "train.curriculum.difficulty: classification has no loss before training",
        ),
    ],
)
def test_orders_that_cannot_be(
    tiny_model: Path, sourced_records: pa.Table, config: TrainConfig, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    task = TaskConfig(labels=sorted(set(sourced_records["completion"].to_pylist())))
    with pytest.raises(UserError, match=says):
        train(
            tiny_model,
            sourced_records,
            with_settings(config, **changes),
            task,
            seed=3,
            out=tmp_path / "out",
            scratch=tmp_path / "scratch",
        )


def test_a_self_paced_training_goes_by_what_it_measures(
    tiny_model: Path,
    sourced_records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    seen: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With rows packed, padded and cut into single records: every step meets the same."""

    def meets(name: str, **changes: Any) -> list[list[int]]:
        changed = with_settings(config, curriculum=SELF_PACED, epochs=3, **changes)
        del seen[:]
        meta = train(
            tiny_model, sourced_records, changed, TASK, seed=3, out=tmp_path / name, scratch=tmp_path / f"{name}-s"
        )
        assert meta["steps"] == 9
        rows = [row for rows in seen for row in rows]
        return [rows[start : start + 4] for start in range(0, 4 * 8, 4)]

    packed = meets("packed")
    assert len({row for rows in packed[:2] for row in rows}) <= 4, "four are open at first"
    assert meets("single", micro_batch_tokens=1) == packed
    monkeypatch.setattr(packing, "has_full_attention", lambda *_: False)
    assert meets("padded") == packed


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_loader_changes_nothing(
    tiny_model: Path, sourced_records: pa.Table, config: TrainConfig, tmp_path: Path, workers: int, prefetch: int
) -> None:
    plain = train(tiny_model, sourced_records, config, TASK, seed=3, out=tmp_path / "plain", scratch=tmp_path / "a")
    ahead = with_settings(config, loader={"workers": workers, "prefetch": prefetch})
    assert (
        train(tiny_model, sourced_records, ahead, TASK, seed=3, out=tmp_path / "ahead", scratch=tmp_path / "b") == plain
    )
    assert contents(tmp_path / "ahead") == contents(tmp_path / "plain")
