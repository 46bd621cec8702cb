"""Computes the influence of each training record on one answer of the champion."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.inspect.labelled_records import cosine_similarities, inputs
from posttrain.loop.context import RoundContext, task_key
from posttrain.loop.stage import CachedWork
from posttrain.models.task import record_turns
from posttrain.store.errors import UserError
from posttrain.store.rows import Run
from posttrain.train.lora_config import LoraConfig
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
    """The influence of training records on an answer.

    Attributes:
        table: ``id, influence, share, label, input, source, line``, the strongest influence towards the answer first;
            ``share`` is the influence over the sum of all absolute influences.
        parameters: Description of the parameters whose gradients were used.
        training: Number of records that the model was trained on.
    """

    table: pa.Table
    parameters: str
    training: int


@dataclass(frozen=True)
class TrainingRun:
    """A model and the run that trained it.

    Attributes:
        model: Id of the model.
        run: Row of the training.
    """

    model: str
    run: Run

    @property
    def dataset(self) -> str:
        """Returns the id of its training set."""
        return self.run.inputs["dataset"]

    @property
    def train(self) -> dict[str, Any]:
        """Returns the train section that the run used."""
        settings: dict[str, Any] = self.run.config["train"]
        return settings


def answer_influence(
    context: RoundContext,
    trained: TrainingRun,
    record: Mapping[str, Any],
    answer: str,
    instead: str | None,
    among: int,
) -> AnswerInfluence:
    """Computes the influence of training records on a model's answer to a record; finished work is found again.

    A record's influence is, to first order, the log-likelihood that the answer would lose without it, minus what the
    other answer would lose. The damping decides its size: only shares and order mean something.

    Args:
        context: Workspace and config.
        trained: The model and its training.
        record: A row of RECORD.
        answer: The model's answer.
        instead: Another answer to compare with; None for the answer alone.
        among: Number of training records to score, those whose inputs are most similar to the record's.
    """
    dataset = context.dataset(trained.dataset).records
    artifact = context.run(ScoreInfluence(trained, record, answer, instead, among))
    scores = parquet.read_table(context.path(artifact.id) / _SCORES)
    return AnswerInfluence(_join_records(scores, dataset), artifact.meta["parameters"], dataset.num_rows)


@dataclass(frozen=True)
class ScoreInfluence(CachedWork):
    """Scores training records by their influence on an answer; the arguments are those of `answer_influence`."""

    trained: TrainingRun
    record: Mapping[str, Any]
    answer: str
    instead: str | None
    among: int
    name = "influence"
    kind = "influence"
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the model, its source and its training set."""
        trained = self.trained
        return {"model": trained.model, "source": trained.run.inputs["source"], "dataset": trained.dataset}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the prompt, the answers and the number of records."""
        # Of the record only the prompt counts: another record with the same prompt has the same influences.
        prompt = json.dumps(record_turns(self.record), ensure_ascii=False)
        answers = {"asked": prompt, "answer": self.answer, "instead": self.instead}
        return {"among": self.among, **answers, **task_key(context.config)}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the influence of each record: on the answer, minus that on the other answer."""
        from posttrain.attribution.causal_lm import encode_record, influence_model
        from posttrain.attribution.influence import influence_functions

        dataset = context.dataset(self.trained.dataset).records
        rows = np.arange(dataset.num_rows)
        if dataset.num_rows > self.among:
            similarities = cosine_similarities(context, dict(self.record), self.trained.dataset)
            # Stable: of equally similar records the earlier one, on every machine.
            rows = np.sort(np.argsort(-similarities, kind="stable")[: self.among])
        lm, parameters = load_trainable(context, self.trained)
        train = encode_training_records(lm, self.trained, dataset.take(pa.array(rows)))
        prompt = record_turns(self.record)
        test = [encode_record(lm, prompt, text) for text in (self.answer, self.instead) if text is not None]
        # Records of similar length share a batch, so that little of it is padding.
        order = np.argsort([len(example.ids) for example in train], kind="stable")
        influence = influence_functions(influence_model(lm), [train[row] for row in order], test, folder=scratch)
        ids = dataset["id"].take(pa.array(rows[order]))
        scores = influence[:, 0] - (influence[:, 1] if self.instead is not None else 0)
        parquet.write_table(pa.table({"id": ids, "influence": scores}), out / _SCORES)
        return {"parameters": parameters}


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
    """Finds the run that trained a model; None for a base model.

    Raises:
        UserError: its objective learns no answers.
    """
    runs = [run for run in context.workspace.metadata.producers(model) if run.stage == "train" and run.status == "done"]
    if not runs:
        return None
    # The last, where several trainings gave the same weights.
    trained = TrainingRun(model, runs[-1])
    objective = trained.train["objective"]["name"]
    if OBJECTIVES[objective].shape not in ("completion", "teacher"):
        raise UserError(
            f"the champion was trained by `{objective}`, and influence is of answers that are learned",
            where="train.objective",
        )
    return trained


def load_trainable(context: RoundContext, trained: TrainingRun) -> "tuple[LanguageModel, str]":
    """Loads the model in float32 with the gradients of the parameters that influence is computed for.

    Returns:
        The model and a description of the parameters: the adapter that was trained, or else the linear layers with
        inputs projected at random to 8 dimensions; of a deep model only those of the last decoder layers.
    """
    import torch

    from posttrain.attribution.causal_lm import load_adapter
    from posttrain.models.language_model import load_language_model as load_model
    from posttrain.train.lora import add_adapter

    adapter = context.path(trained.model) / _ADAPTER
    parts: tuple[str, ...] = ("lora_A", "lora_B")
    if (adapter / "adapter_model.safetensors").is_file():
        base = load_model(context.path(trained.run.inputs["source"]), context.config.task, "float32")
        lm, parameters = load_adapter(base, adapter), "the adapter that was trained"
    else:
        whole = load_model(context.path(trained.model), context.config.task, "float32")
        # A fresh adapter: its first half is the random projection of the inputs, and the gradient of its second half,
        # which is zero, is the projected gradient. It keeps inner products up to noise at a hundredth of the numbers
        # (LoGra, S. Choe et al. 2024, arXiv:2405.13954). Seeded, so that a later run finds the same projection.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            lm = add_adapter(whole, LoraConfig(rank=_ADAPTER_RANK, alpha=_ADAPTER_RANK))
        parameters = f"linear layers, their inputs projected at random to {_ADAPTER_RANK} dimensions"
        parts = ("lora_B",)
    lm.model.eval()
    # No gradient goes further back than the last layers, which say as much as all (TracIn, G. Pruthi et al. 2020,
    # arXiv:2002.08484, section 3.5).
    last, depth = _last_layers([name for name, _ in lm.model.named_parameters() if any(part in name for part in parts)])
    for name, value in lm.model.named_parameters():
        value.requires_grad_(name in last)
    return lm, parameters if depth <= _LAST_LAYERS else f"{parameters}, in the last {_LAST_LAYERS} of {depth} layers"


def _last_layers(names: list[str]) -> tuple[set[str], int]:
    """Returns the names in the last `_LAST_LAYERS` of a model's numbered layers, and the number of layers."""
    # Parameters outside of the layers, such as the head's, count as those of the first.
    numbers = [next((int(word) for word in name.split(".") if word.isdecimal()), 0) for name in names]
    depth = max(numbers) + 1
    return {name for name, number in zip(names, numbers, strict=True) if number >= depth - _LAST_LAYERS}, depth


def encode_training_records(lm: "LanguageModel", trained: TrainingRun, records: pa.Table) -> "list[TokenizedExample]":
    """Encodes training records as the training did."""
    from posttrain.train.data.encoding import build_examples

    return [example.unit[0] for example in build_examples(lm, records, trained.train["max_length"], "completion")]
