"""The contract of objectives, as a test class to inherit from.

class TestExponential(ObjectiveContract):
    @pytest.fixture
    def train(self):
        return {"objective": {"name": "my_objective:EXPONENTIAL", "beta": 0.5}}
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import pack, packed_attention
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.testing.steps import table_of
from posttrain.train.config import TrainConfig
from posttrain.train.data.config import RecordShape
from posttrain.train.data.encoding import build_examples
from posttrain.train.data.record_columns import RecordColumns
from posttrain.train.objectives.base import Objective, ObjectiveInputs
from posttrain.train.objectives.build import build_objective, load_model, record_shape
from posttrain.train.objectives.loss import mean_metrics, merge_metrics
from posttrain.train.objectives.registry import ObjectiveSpec, objective_spec, read_objective

TASK = TaskConfig(system="Name it.", labels=["card", "refund", "top up"])
# Answers of one to several tokens, prompts of different lengths: sequences share rows, where they could leak.
_RECORDS = [
    ("my card is gone", "card", "refund"),
    ("where is my money", "refund", "no"),
    ("i was charged twice for the same thing", "refund", "card lost"),
    ("how do i top up", "top up", "x"),
    ("somebody took my card on the train", "card", "top"),
    ("top", "top up", "card card"),
    ("two weeks and no money", "refund", "who knows"),
    ("it is lost", "card", "good for you"),
]
_ALL = list(range(len(_RECORDS)))
_CUTS = [
    [[row] for row in _ALL],
    [[7, 2, 4], [3], [0, 6, 5, 1]],
]
_TIMES = [2, 1, 0, 3, 1, 0, 1, 2]
_STEPS = 5

Gradients = dict[str, torch.Tensor]


def records_of(shape: RecordShape) -> pa.Table:
    """Returns eight records in the shape that an objective takes; pairs have margins, every third label is False."""
    rows = []
    for number, (prompt, good, bad) in enumerate(_RECORDS, 1):
        row: dict[str, Any] = {"prompt": prompt, "completion": good}
        if shape == "pair":
            row |= {"rejected": bad, "meta": json.dumps({"margin": number / 8})}
        elif shape == "labelled":
            desirable = number % 3 != 0
            row |= {"completion": good if desirable else bad, "meta": json.dumps({"label": desirable})}
        rows.append(row)
    return table_of(*rows)


@dataclass(frozen=True)
class PreparedObjective:
    """An objective over a few records, with its model, ready for a step.

    Attributes:
        lm: the model that is trained, in float32.
        objective: its objective.
    """

    lm: LanguageModel
    objective: Objective

    def backward(self, groups: Sequence[Sequence[int]]) -> tuple[float, dict[str, float]]:
        """Runs a step's backward passes as the trainer does.

        Args:
            groups: the rows of each micro-batch.

        Returns:
            The step's mean loss, and the means of its metrics.
        """
        divisor, total, metrics = self.objective.begin_step(self.lm, groups), 0.0, []
        for rows in groups:
            loss = self.objective.loss(self.lm, pack([self.objective.units[row] for row in rows]), rows)
            (loss.sum / divisor).backward()  # type: ignore[no-untyped-call]
            total += loss.sum.item()
            metrics.append(loss.metrics)
        return total / divisor, mean_metrics(merge_metrics(metrics))

    def gradients(self, groups: Sequence[Sequence[int]]) -> tuple[float, Gradients, dict[str, float]]:
        """Returns the loss of a step, the gradient of each parameter by name, and the metrics."""
        self.lm.model.zero_grad()
        loss, metrics = self.backward(groups)
        parameters = self.lm.model.named_parameters()
        gradients = {name: value.grad.clone() for name, value in parameters if value.grad is not None}
        self.lm.model.zero_grad()
        return loss, gradients, metrics


@contextmanager
def prepare_objective(
    train: Mapping[str, Any], folder: Path, model: Path, records: pa.Table | None = None, *, moved: bool = True
) -> Iterator[PreparedObjective]:
    """Builds and prepares an objective as a training does.

    Args:
        train: the config section ``train``.
        folder: gets what the objective caches.
        model: folder of the model to train.
        records: RECORD table; None: eight of the objective's shape.
        moved: whether the weights move a little after the preparation, so that a reference differs from the policy.
    """
    base = {"precision": "float32", "batch_size": len(_RECORDS), "micro_batch_tokens": 200}
    config = TrainConfig.read({**base, **copy.deepcopy(dict(train))}, "train")
    torch.manual_seed(0)
    lm = load_model(config, model, TASK, "float32")
    records = records_of(config.spec.shape) if records is None else records
    examples = build_examples(lm, records, config.max_length, record_shape(config, records))
    units = [example.unit for example in examples]
    targets, margins = [example.target for example in examples], RecordColumns(records).margins().tolist()
    objective = build_objective(ObjectiveInputs(units, config, lm, targets, margins))
    objective.cache_teacher_outputs(folder)
    longest = max(len(sequence.ids) for unit in objective.units for sequence in unit)
    with objective.attach_modules(lm), packed_attention(lm, longest) as packed:
        assert packed, "the tiny model takes packed rows"
        objective.prepare(lm, folder, padded=False)
        if moved:
            _move(lm)
        yield PreparedObjective(lm, objective)


def assert_same_gradients(gradients: Gradients, expected: Gradients) -> None:
    """Asserts that two steps gave the same gradients, to float32's rounding of the largest element."""
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-6, "all gradients are 0"
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name] / largest, gradient / largest, atol=2e-5, rtol=0, msg=name)


class ObjectiveContract:
    """Tests what every objective promises; inherit and define the fixture ``train``, a config section.

    A step's loss, gradient and metrics do not depend on how it is cut into micro-batches; a record of weight 2 counts
    as if it stood there twice; the loss of each unit, where there is one, has no gradient; and training lowers the
    loss. Redefine the fixture ``records`` for other records than eight short ones.
    """

    @pytest.fixture
    def records(self, train: dict[str, Any]) -> pa.Table:
        """Eight records in the objective's shape."""
        return records_of(_spec(train).shape)

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
        """The folders of a tiny model to train, and of another, its teacher; both read-only."""
        folder = tmp_path_factory.mktemp("models")
        return write_tiny_model(folder / "model"), write_tiny_model(folder / "teacher", seed=5, width=128, layers=3)

    @pytest.fixture
    def prepared(
        self, train: dict[str, Any], records: pa.Table, models: tuple[Path, Path], tmp_path: Path
    ) -> Iterator[PreparedObjective]:
        """The objective and its model."""
        model, teacher = models
        if _spec(train).shape == "teacher":
            objective = read_objective(train["objective"]).model_dump(exclude_unset=True)
            train = {**train, "objective": {**objective, "teacher": str(teacher)}}
        with prepare_objective(train, tmp_path, model, records) as prepared:
            yield prepared

    def test_a_step_is_the_same_however_it_is_cut(self, prepared: PreparedObjective) -> None:
        loss, gradients, metrics = prepared.gradients([_ALL])
        for groups in _CUTS:
            cut_loss, cut_gradients, cut_metrics = prepared.gradients(groups)
            assert cut_loss == pytest.approx(loss, rel=1e-5)
            assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
            assert_same_gradients(cut_gradients, gradients)

    def test_a_weight_is_how_often_a_record_is_there(self, prepared: PreparedObjective, train: dict[str, Any]) -> None:
        if _spec(train).shape in ("labelled", "teacher"):
            return  # `train.weight` is refused for these
        unweighted, expected, _ = prepared.gradients([_ALL])
        prepared.objective.weights = torch.ones(len(_ALL), dtype=torch.float64)
        loss, gradients, _ = prepared.gradients([_ALL])
        assert loss == pytest.approx(unweighted, rel=1e-7)
        assert_same_gradients(gradients, expected)
        prepared.objective.weights = None
        repeated = [row for row, times in enumerate(_TIMES) for _ in range(times)]
        loss, gradients, _ = prepared.gradients([repeated])
        # By a seventh: the scale of the weights must cancel.
        prepared.objective.weights = torch.tensor(_TIMES, dtype=torch.float64) / 7
        for groups in ([_ALL], *_CUTS):
            weighted_loss, weighted_gradients, _ = prepared.gradients(groups)
            assert weighted_loss == pytest.approx(loss, rel=1e-5)
            assert_same_gradients(weighted_gradients, gradients)

    def test_training_lowers_the_loss(self, prepared: PreparedObjective) -> None:
        parameters = [value for value in prepared.lm.model.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        losses = []
        for _ in range(_STEPS):
            optimizer.zero_grad()
            losses.append(prepared.backward([_ALL])[0])
            optimizer.step()
        assert losses[-1] < losses[0]

    def test_has_a_summary_and_described_settings(self, train: dict[str, Any]) -> None:
        spec = _spec(train)
        assert spec.summary
        assert "\n" not in spec.summary
        assert all(field.description for field in spec.config.model_fields.values())


def _spec(train: Mapping[str, Any]) -> ObjectiveSpec:
    return objective_spec(read_objective(train["objective"]).name)


@torch.no_grad()
def _move(lm: LanguageModel) -> None:
    for weight in lm.model.parameters():
        weight += 0.02 * torch.randn_like(weight)
