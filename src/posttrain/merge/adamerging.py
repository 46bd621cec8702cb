"""AdaMerging: coefficients of task vectors that make the merged model sure of its answers, learned without labels.

AdaMerging++ learns them for task vectors that TIES has trimmed, without the elements whose signs lost.

Yang et al., AdaMerging: Adaptive Model Merging for Multi-Task Learning, ICLR 2024 (arXiv:2310.02575), section 3.2."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from posttrain.merge.recipe import Recipe
from posttrain.merge.sources import HEAD, LAYER, layer_of
from posttrain.merge.vocabulary_view import is_embedding
from posttrain.models.chat import TokenizedExample
from posttrain.models.head import map_logits, predicting_states, token_log_probabilities
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.packing import Unit, micro_batches, pack, packed_attention
from posttrain.models.task import TaskConfig, Turns
from posttrain.store.errors import UserError
from posttrain.store.progress import progress_bar
from posttrain.store.section import Section

_BATCH_TOKENS = 2048

_WINDOW = 10  # steps that the first and last entropy are means of


class AdaMergingConfig(Section):
    """How the coefficients are learned; the options of ``--method adamerging``."""

    steps: int = Field(100, ge=1, description="Steps of Adam.")
    learning_rate: float = Field(0.01, gt=0, description="Its rate; the authors' is 0.001, with ten times the steps.")
    batch_size: int = Field(8, ge=1, description="Prompts a task and step.")
    start: float = Field(0.3, description="All coefficients at the start, as the authors have it.")
    by_layer: bool = Field(True, description="A coefficient for each layer, or one a model.")
    density: float | None = Field(
        None,
        gt=0,
        le=1,
        description="AdaMerging++: the share of each task vector's elements that stay before signs are elected; the "
        "authors' is 0.2. None for AdaMerging.",
    )


@dataclass(frozen=True)
class UnlabelledTask:
    """Prompts of a task.

    Attributes:
        name: its name.
        task: how they are put to a model, and its label set, if there is one.
        prompts: the conversations before the answer.
    """

    name: str
    task: TaskConfig
    prompts: Sequence[Turns]


@dataclass(frozen=True)
class LearnedCoefficients:
    """The coefficients.

    Attributes:
        groups: name of each group of tensors: a layer's (``layers.3.``) or a tensor's outside of the layers.
        values: float64 [models, groups].
        entropies: mean entropy of the tasks' batches before each step, in nats.
    """

    groups: Sequence[str]
    values: Tensor
    entropies: Sequence[float]

    @property
    def first(self) -> float:
        """The mean entropy of the first steps."""
        return _mean(self.entropies[:_WINDOW])

    @property
    def last(self) -> float:
        """The mean entropy of the last steps."""
        return _mean(self.entropies[-_WINDOW:])

    def recipe(self, recipe: Recipe, density: float | None = None) -> Recipe:
        """Returns the recipe with these coefficients, which gives the same model without any data.

        Args:
            recipe: the recipe of task arithmetic whose models they were learned for.
            density: of AdaMerging++, whose recipe is one of `ties`.
        """
        method = {"method": "task_arithmetic", "parameters": {}}
        values = recipe.model_dump(exclude_unset=True) | (method if density is None else elected_task_vectors(density))
        entries = _members(recipe)
        values["models"] = [
            {"model": entry.model, "adapter": entry.adapter, "parameters": {"weight": self._weights(number)}}
            for number, entry in enumerate(entries)
        ]
        return Recipe.read(values, "adamerging")

    def _weights(self, model: int) -> float | list[dict[str, Any]]:
        values = {group: round(float(value), 6) for group, value in zip(self.groups, self.values[model], strict=True)}
        if list(values) == [""]:
            return values[""]
        weights = [{"match": pattern_of(group), "value": value} for group, value in values.items()]
        # A model with tied embeddings may be stored with the head too, which is then the same weights.
        embedding = next((group for group in values if is_embedding(group)), None)
        if embedding is not None and HEAD not in values:
            weights.append({"match": pattern_of(HEAD), "value": values[embedding]})
        return weights


def learn_coefficients(
    base: Path, models: Sequence[Path], tasks: Sequence[UnlabelledTask], config: AdaMergingConfig, seed: int = 0
) -> LearnedCoefficients:
    """Learns lambda of theta_0 + sum_i lambda_i,l tau_i,l by Adam on the mean entropy of the tasks' batches.

    For a task with a label set the entropy is that of the distribution over its labels, each the product of its
    tokens' probabilities, stop token included; else that of the token with which the answer begins, over the whole
    vocabulary: what follows it is not known without an answer. A group of coefficients is a decoder layer, or a tensor
    outside of the layers; the authors' code has one a tensor, and ``by_layer: false`` one a model (task-wise
    AdaMerging). The gradient by lambda_i,l is the inner product of the gradient by the layer's weights with tau_i,l,
    which is the chain rule: no graph over the sum is kept.

    Memory grows with the models: the merged weights and their gradients in float32, base and models as they are stored.

    Args:
        base: folder of the model that all were trained from.
        models: folders of the models.
        tasks: at least one.
        config: steps and the like.
        seed: of the order of the prompts.

    Returns:
        The coefficients; with zero task vectors they stay at their start.

    Raises:
        UserError: there are no prompts, the models have other tensors, or the entropy is not finite.
    """
    for task in tasks:
        if not task.prompts:
            raise UserError("has no prompts", where=task.name, fix="give records with a prompt")
    if not tasks:
        raise UserError("learns from data", where="adamerging", fix="name a file of records with --data")
    merged = MergedModel(base, models, config.by_layer)
    coefficients = torch.full((len(models), len(merged.groups)), config.start, dtype=torch.float64)
    optimizer = torch.optim.Adam([coefficients], lr=config.learning_rate)
    batches = [_batches(task.prompts, config.batch_size, seed + number) for number, task in enumerate(tasks)]
    entropies: list[float] = []
    with (
        packed_attention(merged.lm, _longest(merged.lm, tasks)) as packs,
        progress_bar("adapting", config.steps, "steps") as advance,
    ):
        for _ in range(config.steps):
            step = [(task.task, next(batch)) for task, batch in zip(tasks, batches, strict=True)]
            entropy, coefficients.grad = merged.entropy_and_gradient(coefficients, step, packs)
            if not (math.isfinite(entropy) and coefficients.grad.isfinite().all()):
                raise UserError("the entropy is not finite", where="adamerging", fix="lower learning_rate or start")
            entropies.append(entropy)
            optimizer.step()
            advance(1)
    return LearnedCoefficients(merged.groups, coefficients, entropies)


class MergedModel:
    """A base with task vectors, whose weights are set by coefficients.

    Attributes:
        lm: the model, in float32.
        groups: names of the groups of coefficients.
    """

    def __init__(self, base: Path, models: Sequence[Path], by_layer: bool = True) -> None:
        self.lm = load_language_model(base, TaskConfig(), "float32")
        self._parameters = dict(self.lm.model.named_parameters())
        self._base = {name: _narrow(parameter.detach()) for name, parameter in self._parameters.items()}
        self._models = [self._read(folder) for folder in models]
        # Files of a decoder alone lack the prefix, and a recipe must fit the names in them.
        prefix = f"{self.lm.model.base_model_prefix}."
        names = [group_of(name.removeprefix(prefix)) if by_layer else "" for name in self._parameters]
        # Layers first: the first rule of a recipe counts, and `norm.weight` may be the end of a layer's tensor too.
        self.groups = sorted(dict.fromkeys(names), key=lambda group: not group.endswith("."))
        self._group = {name: self.groups.index(group) for name, group in zip(self._parameters, names, strict=True)}

    def _read(self, folder: Path) -> dict[str, Tensor]:
        lm = load_language_model(folder, TaskConfig(), "float32")
        weights = {name: parameter.detach() for name, parameter in lm.model.named_parameters()}
        for name, parameter in self._parameters.items():
            if name not in weights or weights[name].shape != parameter.shape:
                raise UserError(f"has no tensor {name} as the base has it", where=str(folder))
        return {name: _narrow(weight) for name, weight in weights.items()}

    @torch.no_grad()
    def set_coefficients(self, coefficients: Tensor) -> None:
        """Sets the weights to theta_0 + sum_i lambda_i tau_i.

        Args:
            coefficients: [models, groups].
        """
        for name, parameter in self._parameters.items():
            parameter.copy_(self._base[name])
            for model, weights in enumerate(self._models):
                value = float(coefficients[model, self._group[name]])
                parameter.add_(weights[name].float() - self._base[name].float(), alpha=value)

    def entropy_and_gradient(
        self, coefficients: Tensor, batches: Sequence[tuple[TaskConfig, Sequence[Turns]]], packs: bool
    ) -> tuple[float, Tensor]:
        """Returns the mean over the tasks of the mean entropy of their prompts, and its gradient.

        Args:
            coefficients: float64 [models, groups].
            batches: each task with its prompts.
            packs: whether sequences share a row; see `packed_attention`.

        Returns:
            The entropy in nats; float64 [models, groups].
        """
        self.set_coefficients(coefficients)
        self.lm.model.zero_grad(set_to_none=True)
        total = 0.0
        for task, prompts in batches:
            self.lm.task = task
            for entropies in prompt_entropies(self.lm, prompts, packs):
                part = entropies.sum() / (len(prompts) * len(batches))
                part.backward()  # type: ignore[no-untyped-call]
                total += float(part.detach())
        return total, self._gradient(coefficients)

    @torch.no_grad()
    def _gradient(self, coefficients: Tensor) -> Tensor:
        gradient = torch.zeros_like(coefficients)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                for model, weights in enumerate(self._models):
                    vector = weights[name].float() - self._base[name].float()
                    gradient[model, self._group[name]] += float((parameter.grad * vector).sum(dtype=torch.float64))
        return gradient


def prompt_entropies(lm: LanguageModel, prompts: Sequence[Turns], packs: bool) -> Iterator[Tensor]:
    """Yields the entropies of a model's answers, in nats, with their graph, a micro-batch at a time.

    Args:
        lm: the model with its task, whose label set decides whose entropy it is; see `learn_coefficients`.
        prompts: N conversations.
        packs: whether sequences share a row.

    Yields:
        float32 [n], of the next prompts.
    """
    labels = lm.task.label_set
    if labels:
        units: list[Unit] = [[lm.encode(prompt, label) for label in labels] for prompt in prompts]
    else:
        # One more token behind the prompt, any: it is what the last state of the prompt predicts.
        stop = min(lm.chat.stop_ids)
        units = [
            [TokenizedExample([*ids, stop], [False] * len(ids) + [True])]
            for ids in (lm.prompt_ids(prompt) for prompt in prompts)
        ]
    for batch in micro_batches(units, _BATCH_TOKENS):
        packed = pack(batch, lm.device, padded=not packs)
        states = predicting_states(lm, packed)
        if labels:
            tokens = token_log_probabilities(lm, states, packed.targets)
            sums = torch.zeros(packed.sequences, dtype=tokens.dtype, device=tokens.device)
            sums = sums.index_add(0, packed.sequence, tokens).reshape(len(batch), len(labels))
            yield entropy(sums)
        else:
            yield torch.cat(map_logits(lm, states, lambda logits, rows: entropy(logits)))


def entropy(logits: Tensor) -> Tensor:
    """Returns the entropy -sum p ln p of the softmax over the last dimension, in nats."""
    log_probabilities = logits.log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def elected_task_vectors(density: float) -> dict[str, Any]:
    """Returns method and options of the sum of what TIES leaves of each task vector, which weights are factors of.

    With the weight of one model at 1 and the others at 0 it is that model's vector tau_i of AdaMerging++: trimmed to
    the share ``density`` of its elements over the whole model, without those whose sign is not that of the vectors'
    sum (arXiv:2310.02575, section 3.2).
    """
    options = {"density": density, "trim": "model", "election": "unweighted", "normalize": False}
    return {"method": "ties", "parameters": options}


def group_of(name: str) -> str:
    """Returns the group of a tensor: its layer's, such as ``layers.3.``, or its own name outside of the layers."""
    match = LAYER.search(name)
    return match.group(0).lstrip(".") if match and layer_of(name) is not None else name


def pattern_of(group: str) -> str:
    """Returns the regular expression of a group's tensors, whatever stands before ``layers``, for a recipe."""
    if not group:
        return ""
    escaped = group.replace(".", r"\.")
    return rf"(^|\.){escaped}" if group.endswith(".") else rf"(^|\.){escaped}$"


def _members(recipe: Recipe) -> list[Any]:
    return [entry for entry in recipe.models if entry.model != recipe.base or entry.adapter]


def _narrow(weight: Tensor) -> Tensor:
    """Returns a copy of the weight, in bfloat16 where that loses nothing, as most models are stored so."""
    half = weight.bfloat16()
    return half if torch.equal(half.float(), weight) else weight.clone()


def _batches(prompts: Sequence[Turns], size: int, seed: int) -> Iterator[Sequence[Turns]]:
    """Yields batches without end, in a new order each pass."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[int] = []
    while True:
        while len(rows) < size:
            rows += torch.randperm(len(prompts), generator=generator).tolist()
        yield [prompts[row] for row in rows[:size]]
        rows = rows[size:]


def _longest(lm: LanguageModel, tasks: Sequence[UnlabelledTask]) -> int:
    longest = 1
    for task in tasks:
        lm.task = task.task
        answer = max((len(lm.answer_ids(label)) for label in task.task.label_set), default=1)
        longest = max(longest, answer + max(len(lm.prompt_ids(prompt)) for prompt in task.prompts))
    return longest


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(len(values), 1)
