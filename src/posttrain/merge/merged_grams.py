"""Gram matrices of the inputs that the merged model's own earlier layers give, for RegMean++: merged layer by layer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from posttrain.merge.engine import MergeJob
from posttrain.merge.gram_matrices import GramMatrices, experts_apart
from posttrain.merge.layerwise_model import LayerwiseModel
from posttrain.merge.output_folder import write_config
from posttrain.merge.plan import MergePlan, Sources, TensorPlan
from posttrain.merge.statistics import Example, ModelStatistics, TokenSequence, encode
from posttrain.merge.statistics_cache import (
    VERSION,
    StatisticsFile,
    folder_digests,
    is_whole,
    source_digests,
    statistics_file,
    write_statistics,
)
from posttrain.merge.tensor_reader import TensorInput
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.store.progress import progress_bar

_STATISTIC = "merged_gram"

_ARENA_BYTES = 256 << 20  # of stored weights of one tensor


def uses_merged_grams(tensor: TensorPlan) -> bool:
    """Returns whether a tensor's method needs these Gram matrices."""
    return tensor.method is not None and tensor.method.statistic == _STATISTIC


def with_merged_grams(
    plan: MergePlan,
    sources: Sources,
    data: Mapping[str, str],
    examples: Mapping[str, Sequence[Example]],
    opened: ExitStack,
) -> MergePlan:
    """Computes the Gram matrices of each layer, or reads them from the cache, and returns the plan with them.

    From the first layer to the last: each model's own layer runs on what the merged layers before it make of the
    model's data, which gives its Gram matrices; the layer is merged, as the plan says, and run on the same. The output
    head follows, unless it is the embedding. A layer's matrices are a file of their own, so that a merge that was
    killed begins with the layer it was at. Of the weights, one layer and what is outside of the layers is in memory;
    of the data, the hidden states of all tokens, and the matrices of one layer of all models.

    Args:
        plan: a plan with all other statistics.
        sources: the models, as they were opened.
        data: the name of each model's records, by the model's name.
        examples: the records of each model, as they are shown to it, by the model's name.
        opened: closes the files.

    Raises:
        UserError: transformers does not know the family, or names its parameters otherwise than the files.
    """
    for source in plan.sources:
        source.prepare()
    with TemporaryDirectory() as folder:
        write_config(plan, Path(folder))
        merger = _LayerMerger(plan, LayerwiseModel(Path(folder)), data, examples)
        key = _key(plan, sources, examples, folder_digests(Path(folder)))
    paths = {step: statistics_file(digest({"key": key, "layer": step})) for step in merger.steps if merger.names(step)}
    missing = [step for step, path in paths.items() if not is_whole(path)]
    with progress_bar("RegMean++", len(merger.steps), "layers") as advance:
        for step in merger.steps:
            if step in missing:
                write_statistics(paths[step], merger.grams(step))
            if step in paths:
                file = StatisticsFile(f"Gram matrices of layer {step}", paths[step])
                opened.callback(file.close)
                merger.add_statistics(step, file)
            # The merged layers are run only as far as something is missing behind them.
            if missing and step < missing[-1]:
                merger.merge(step)
            advance(1)
    return replace(plan, tensors=merger.tensors, statistics=[*plan.statistics, *merger.description()])


class _LayerMerger:
    """Merges a plan layer by layer, and runs the merged layers and the models' own on the data.

    Args:
        plan: the plan.
        model: the merged model.
        data: the name of each model's records, by the model's name.
        examples: the records of each model; where models share a list, it is read once.

    Attributes:
        tensors: of the plan, with the Gram matrices that are known.
        steps: numbers of the layers, and the next one for the output head if it has Gram matrices.
    """

    def __init__(
        self,
        plan: MergePlan,
        model: LayerwiseModel,
        data: Mapping[str, str],
        examples: Mapping[str, Sequence[Example]],
    ) -> None:
        self.tensors, self._model, self._data = list(plan.tensors), model, data
        self._memory = _Memory()
        # The list is this one's own: tensors get their statistics as the layers before them are merged.
        self._job = MergeJob(replace(plan, tensors=self.tensors), _ARENA_BYTES, self._memory)
        self._numbers = self._numbers_of_parameters()
        self.steps = list(range(len(model.layers)))
        if model.head is not None and model.head in self._numbers and uses_merged_grams(self._tensor(model.head)):
            self.steps.append(len(model.layers))
        names = {
            entry.source.name: None for tensor in self.tensors if uses_merged_grams(tensor) for entry in tensor.inputs
        }
        lists = {id(examples[name]): examples[name] for name in names}
        self._list_of = {name: id(examples[name]) for name in names}
        self._sequences: dict[int, list[TokenSequence]] = {key: encode(model.lm, part) for key, part in lists.items()}
        self._states: dict[int, list[Tensor | None]] = {
            key: [None] * len(sequences) for key, sequences in self._sequences.items()
        }
        self._models = list(names)
        self._ready = False

    def _numbers_of_parameters(self) -> dict[str, int]:
        """Returns the number of the plan's tensor that makes each parameter or buffer."""
        own = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        model = self._model.lm.model
        # Files of a decoder alone lack the prefix.
        prefix = f"{model.base_model_prefix}."
        numbers = {}
        for name in model.state_dict():
            stored = name if name in own else name.removeprefix(prefix)
            if stored in own:
                numbers[name] = own[stored]
        decoder = {*self._model.outside, *(name for layer in self._model.layers for name in layer)}
        for name, _ in model.named_parameters():
            if name in decoder and name not in numbers:
                raise UserError(
                    f"regmean_plus_plus runs layers, and the files have no tensor of the name of the parameter {name}",
                    where="method",
                    fix="use regmean",
                )
        return numbers

    def _tensor(self, name: str) -> TensorPlan:
        return self.tensors[self._numbers[name]]

    def names(self, step: int) -> list[str]:
        """Returns the parameters of a step that have Gram matrices, or become the plain mean for want of them."""
        names = [self._model.head or ""] if step == len(self._model.layers) else self._model.layers[step]
        return [name for name in names if name in self._numbers and uses_merged_grams(self._tensor(name))]

    def grams(self, step: int) -> ModelStatistics:
        """Computes the Gram matrices of a layer's or the head's inputs in each model, by `_entry`."""
        self._load_outside()
        names = self.names(step)
        tensors: dict[str, Tensor] = {}
        shared: dict[str, str] = {}
        first: list[str] = []
        inputs = self._tensor(names[0]).inputs if names else ()
        for number, entry in enumerate(inputs):
            is_head = step == len(self._model.layers)
            grams = self._head_grams(entry) if is_head else self._layer_grams(step, number, entry)
            # Also those of matrices that another method merges, as others may share them.
            tensors |= {_entry(name, number): gram for name, gram in grams.tensors().items()}
            shared |= {_entry(name, number): _entry(owner, number) for name, owner in grams.shared.items()}
            first += [_entry(name, number) for name in grams.inputs_first]
        sequences = [sequence for part in self._sequences.values() for sequence in part]
        answers = sum(sequence.answer for sequence in sequences)
        return ModelStatistics(tensors, len(sequences), answers, shared=shared, inputs_first=sorted(first))

    def _layer_grams(self, layer: int, number: int, entry: TensorInput) -> GramMatrices:
        self._model.load(layer, lambda name: self._of_model(name, number))
        grams = GramMatrices(self._model.parameters(layer))
        key = self._list_of[entry.source.name]
        with experts_apart(self._model.lm.model):
            for sequence, states in zip(self._sequences[key], self._states[key], strict=True):
                with grams:
                    self._model.run(sequence, layer, states)
        return grams

    def _head_grams(self, entry: TensorInput) -> GramMatrices:
        assert self._model.head is not None
        grams = GramMatrices({})
        key = self._list_of[entry.source.name]
        for sequence, states in zip(self._sequences[key], self._states[key], strict=True):
            grams.add(self._model.head, self._model.last_states(sequence, states))
        return grams

    def add_statistics(self, step: int, file: StatisticsFile) -> None:
        """Adds Gram matrices to the tensors that they are of."""
        known = file.shapes()
        for name in self.names(step):
            tensor = self._tensor(name)
            entries = tuple(TensorInput(file, _entry(name, number)) for number in range(len(tensor.inputs)))
            if all(entry.tensor in known for entry in entries):
                first = entries[0].tensor in file.inputs_first
                self.tensors[self._numbers[name]] = replace(tensor, statistics=entries, inputs_first=first)

    def merge(self, layer: int) -> None:
        """Merges a layer, runs it on the data, and frees it."""
        self._load_outside()
        self._model.load(layer, self._merged)
        for key, sequences in self._sequences.items():
            states = self._states[key]
            for number, sequence in enumerate(sequences):
                states[number] = self._model.run(sequence, layer, states[number])
        self._model.unload(layer)

    def _load_outside(self) -> None:
        if not self._ready:
            self._model.load(None, self._merged)
        self._ready = True

    def _merged(self, name: str) -> Tensor | None:
        number = self._numbers.get(name)
        if number is None:
            return None
        self._job.merge(number)
        return self._memory.tensor.view(self.tensors[number].shape)

    def _of_model(self, name: str, number: int) -> Tensor | None:
        """Returns a parameter as the model of this number has it."""
        if name not in self._numbers:
            return None
        tensor = self._tensor(name)
        entry = tensor.inputs[number]
        values = torch.empty(math.prod(tensor.shape), dtype=entry.source.dtype(entry.tensor))
        entry.source.read(entry.tensor, 0, values)
        return values.view(tensor.shape)

    def description(self) -> list[dict[str, Any]]:
        """Returns what was computed, for ``merge.json``."""
        sequences = {name: self._sequences[self._list_of[name]] for name in self._models}
        return [
            {
                "model": name,
                "statistic": _STATISTIC,
                "data": self._data[name],
                "examples": len(sequences[name]),
                "tokens": sum(sequence.answer for sequence in sequences[name]),
            }
            for name in self._models
        ]


class _Memory:
    """Takes one merged tensor at a time, and keeps it."""

    tensor: Tensor

    def write(self, tensor: str, parts: Iterable[Tensor]) -> str:
        copies = [part.reshape(-1).clone() for part in parts]
        self.tensor = torch.cat(copies) if copies else torch.empty(0)
        return ""


def _entry(name: str, number: int) -> str:
    """Returns the name of a Gram matrix in a layer's file: of a parameter, and the number of the model."""
    return f"{name}.{number}"


def _key(
    plan: MergePlan,
    sources: Sources,
    examples: Mapping[str, Sequence[Example]],
    config: Mapping[str, str],
) -> str:
    """Returns the digest of all that the Gram matrices depend on; where the models lie is none of it."""
    numbers = {source.name: number for number, source in enumerate(sources.values())}

    def described(entry: TensorInput | None) -> Any:
        return None if entry is None else [numbers[entry.source.name], entry.tensor]

    return digest(
        {
            "version": VERSION,
            "statistic": _STATISTIC,
            "models": [source_digests(source) for source in sources.values()],
            "examples": [
                [list(example) for example in examples[name]] if name in examples else None for name in numbers
            ],
            "config": dict(config),
            "tensors": [
                [
                    tensor.name,
                    str(tensor.dtype),
                    tensor.method and tensor.method.name,
                    dict(tensor.options),
                    [described(entry) for entry in tensor.inputs],
                    described(tensor.base),
                ]
                for tensor in plan.tensors
            ],
            "align": plan.recipe.align,
            "seed": plan.recipe.seed,
            # Of other statistics that layers are merged with by rules.
            "statistics": plan.recipe.statistics.model_dump(mode="json"),
        }
    )
