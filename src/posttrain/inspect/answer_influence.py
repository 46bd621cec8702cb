"""The influence of each training record on one answer of the champion."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.attribution.influence.methods import INFLUENCE_METHODS
from posttrain.inspect.labelled_records import cosine_similarities, inputs
from posttrain.loop.context import RoundContext, task_key
from posttrain.loop.stage import Stage
from posttrain.models.task import record_turns
from posttrain.store.errors import UserError, suggest
from posttrain.store.rows import Run
from posttrain.train.config import LoraConfig
from posttrain.train.objectives.registry import OBJECTIVES

if TYPE_CHECKING:
    from posttrain.models.chat import TokenizedExample
    from posttrain.models.language_model import LanguageModel

_SCORES = "influence.parquet"

_ADAPTER = "adapter"

_ADAPTER_RANK = 8

_LAST_LAYERS = 4


@dataclass(frozen=True)
class AnswerInfluence:
    """What each training record that was looked at did to an answer.

    Attributes:
        table: ``id, influence, share, label, input, source, line``, what pushed most towards the answer first;
            ``share`` is the influence over the sum of all sizes.
        parameters: which of the model's count.
        training: records that the model was trained on.
    """

    table: pa.Table
    parameters: str
    training: int


def check_influence_method(name: str) -> None:
    """Raise a UserError unless there is such a method."""
    if name not in INFLUENCE_METHODS:
        raise UserError(f"no method `{name}`; {suggest(name, INFLUENCE_METHODS)}", where="--method")


@dataclass(frozen=True)
class TrainingRun:
    """How a model came about.

    Attributes:
        model: its id.
        run: the training.
    """

    model: str
    run: Run

    @property
    def dataset(self) -> str:
        """The id of its training set."""
        return self.run.inputs["dataset"]

    @property
    def train(self) -> dict[str, Any]:
        """The settings that it was trained with."""
        settings: dict[str, Any] = self.run.config["train"]
        return settings


def answer_influence(
    context: RoundContext,
    trained: TrainingRun,
    record: Mapping[str, Any],
    answer: str,
    instead: str | None,
    method: str,
    among: int,
) -> AnswerInfluence:
    """What the training records did to a model's answer to a record; computed once.

    The score of a training record is to first order what leaving it out would take from the log-likelihood of the
    answer, less what it would take from that of the other answer. The unit is nats by the methods that invert the
    curvature, though the damping decides the size, so that only shares and order mean something; `tracin` and `less`
    are of the trained weights alone, as checkpoints of a finished training are not kept, and `trak` of one model.
    `less` takes Adam's moments that these weights would come to, and of two answers the difference of two cosines.

    Args:
        context: of the workspace.
        trained: the model and its training.
        record: a row of RECORD.
        answer: what the model said.
        instead: another answer; None: none.
        method: one of `INFLUENCE_METHODS`.
        among: training records that are looked at, those whose inputs are most like the record's.
    """
    dataset = context.dataset(trained.dataset).records
    artifact = context.run(ScoreInfluence(trained, record, answer, instead, method, among))
    scores = parquet.read_table(context.path(artifact.id) / _SCORES)
    return AnswerInfluence(_join_records(scores, dataset), artifact.meta["parameters"], dataset.num_rows)


@dataclass(frozen=True)
class ScoreInfluence(Stage):
    """Scores training records by their influence on an answer; the arguments are those of `answer_influence`."""

    trained: TrainingRun
    record: Mapping[str, Any]
    answer: str
    instead: str | None
    method: str
    among: int
    name = "influence"
    kind = "influence"
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """The model, what it was trained from, and its training set."""
        trained = self.trained
        return {"model": trained.model, "source": trained.run.inputs["source"], "dataset": trained.dataset}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """The prompt, which is all that counts of the record, the answers and the method."""
        asked = json.dumps(record_turns(self.record), ensure_ascii=False)
        answers = {"asked": asked, "answer": self.answer, "instead": self.instead}
        return {"method": self.method, "among": self.among, **answers, **task_key(context.config)}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Write the influence of each record, of the first answer less that of the other."""
        from posttrain.attribution.influence.causal_lm import encode_record, functional_causal_lm

        dataset = context.dataset(self.trained.dataset).records
        rows = np.arange(dataset.num_rows)
        if dataset.num_rows > self.among:
            similarities = cosine_similarities(context, dict(self.record), self.trained.dataset)
            rows = np.sort(np.argsort(-similarities, kind="stable")[: self.among])
        lm, parameters = load_trainable(context, self.trained)
        train = encode_training_records(lm, self.trained, dataset.take(pa.array(rows)))
        prompt = record_turns(self.record)
        test = [encode_record(lm, prompt, text) for text in (self.answer, self.instead) if text is not None]
        # Records of like length share a batch, so that little of it is padding.
        order = np.argsort([len(example.ids) for example in train], kind="stable")
        influence = INFLUENCE_METHODS[self.method](
            functional_causal_lm(lm),
            [train[row] for row in order],
            test,
            learning_rate=self.trained.train["learning_rate"],
            folder=scratch,
        )
        ids = dataset["id"].take(pa.array(rows[order]))
        scores = influence.scores[:, 0] - (influence.scores[:, 1] if self.instead is not None else 0)
        parquet.write_table(pa.table({"id": ids, "influence": scores}), out / _SCORES)
        residual = None if influence.residuals is None else float(influence.residuals.max())
        return {"parameters": parameters, "evaluations": influence.evaluations, "residual": residual}


def _join_records(scores: pa.Table, dataset: pa.Table) -> pa.Table:
    row_of = {id: row for row, id in enumerate(dataset["id"].to_pylist())}
    records = dataset.take(pa.array([row_of[id] for id in scores["id"].to_pylist()], pa.int64()))
    size = float(np.abs(scores["influence"].to_numpy()).sum())
    shares = scores["influence"].to_numpy() / (size or 1)
    columns = {"share": shares, "label": records["completion"], "input": inputs(records)}
    columns |= {name: records[name] for name in ("source", "line")}
    table = pa.table({**{name: scores[name] for name in scores.column_names}, **columns})
    return table.sort_by([("influence", "descending"), ("id", "ascending")]).combine_chunks()


def find_training_run(context: RoundContext, model: str) -> TrainingRun | None:
    """The training that made a model; None of a base model.

    Raises:
        UserError: its objective is not to learn answers.
    """
    runs = [run for run in context.workspace.metadata.producers(model) if run.stage == "train" and run.status == "done"]
    if not runs:
        return None
    trained = TrainingRun(model, runs[-1])
    if OBJECTIVES[trained.train["objective"]].shape not in ("completion", "teacher"):
        raise UserError(
            f"the champion was trained by `{trained.train['objective']}`, and influence is of answers that are learned",
            where="train.objective",
        )
    return trained


def load_trainable(context: RoundContext, trained: TrainingRun) -> "tuple[LanguageModel, str]":
    """The model in float32 with the parameters that count requiring a gradient, and what these are, in words.

    Of a model that an adapter was trained for it is that adapter. Of any other the linear layers count, each weight
    matrix seen through a random projection of its inputs to 8 dimensions: a fresh adapter whose second half, which is
    zero, requires the gradient. So inner products of gradients are kept up to noise (as in LoGra, S. Choe et al. 2024,
    arXiv:2405.13954), at a hundredth of the numbers. Of a deep model only the last decoder layers count, as in TracIn
    (G. Pruthi et al. 2020, arXiv:2002.08484, section 3.5): no gradient goes further back then.
    """
    import torch

    from posttrain.attribution.influence.causal_lm import load_adapter
    from posttrain.models.language_model import load_language_model as load_model
    from posttrain.train.lora import add_adapter

    adapter = context.path(trained.model) / _ADAPTER
    if (adapter / "adapter_model.safetensors").is_file():
        base = load_model(context.path(trained.run.inputs["source"]), context.config.task, "float32")
        lm, what, part = load_adapter(base, adapter), "the adapter that was trained", "lora_"
    else:
        whole = load_model(context.path(trained.model), context.config.task, "float32")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            lm = add_adapter(whole, LoraConfig(rank=_ADAPTER_RANK, alpha=_ADAPTER_RANK))
        what, part = f"linear layers, their inputs projected at random to {_ADAPTER_RANK} dimensions", "lora_B"
    lm.model.eval()
    last, depth = _last_layers([name for name, _ in lm.model.named_parameters() if part in name])
    for name, value in lm.model.named_parameters():
        value.requires_grad_(name in last)
    return lm, what if depth <= _LAST_LAYERS else f"{what}, in the last {_LAST_LAYERS} of {depth} layers"


def _last_layers(names: list[str]) -> tuple[set[str], int]:
    """The parameters of the last `_LAST_LAYERS` of a model's numbered layers, and how many layers there are."""
    numbers = [next((int(word) for word in name.split(".") if word.isdecimal()), 0) for name in names]
    depth = max(numbers) + 1
    return {name for name, number in zip(names, numbers, strict=True) if number >= depth - _LAST_LAYERS}, depth


def encode_training_records(lm: "LanguageModel", trained: TrainingRun, records: pa.Table) -> "list[TokenizedExample]":
    """The training records as the training met them."""
    from posttrain.train.data.encoding import build_examples

    return [one.unit[0] for one in build_examples(lm, records, trained.train["max_length"], "completion")]
