"""Gram matrices of the inputs of a model's linear layers, as RegMean needs them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from posttrain.merge.statistics import Example, ModelStatistics, encode, hidden_states
from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.store.progress import progress_bar


class GramMatrices(TorchFunctionMode):
    """Sums X^T X over the inputs X of all products with a parameter that are computed inside of ``with``.

    It watches the products, not the modules: routers and experts of a mixture are no `torch.nn.Linear`, and multiply
    all the same. The products of one call are summed in float32, and those of the calls in float64.

    Args:
        parameters: matrices [outputs, inputs], or [inputs, outputs] as GPT-2's, by name; with three dimensions, one
            matrix an expert.

    Attributes:
        shared: for matrices that read what another one reads, as keys do what queries do, the name of that one.
        inputs_first: names of the matrices [inputs, outputs].
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        self._matrices: dict[int, tuple[str, int | None, Tensor]] = {}
        for name, parameter in parameters.items():
            if parameter.dim() == 2:
                self._matrices[parameter.data_ptr()] = name, None, parameter
            elif parameter.dim() == 3:
                for expert, matrix in enumerate(parameter):
                    self._matrices[matrix.data_ptr()] = name, expert, matrix
        self._sums: dict[str, Tensor] = {}
        self._last: tuple[Tensor | None, str] = (None, "")
        self.shared: dict[str, str] = {}
        self.inputs_first: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if function is nn.functional.linear:
            missing = ("input", "weight")[len(arguments) :]
            self._watch(*[*arguments[:2], *(options[name] for name in missing)], inputs_first=False)
        elif function is torch.addmm and len(arguments) == 3:
            self._watch(*arguments[1:], inputs_first=True)  # transformers' Conv1D
        return function(*arguments, **options)

    def _watch(self, inputs: Tensor, weight: Tensor, *, inputs_first: bool) -> None:
        name, expert, matrix = self._matrices.get(weight.data_ptr(), ("", None, None))
        # A part of a matrix, or its transpose, begins where the matrix does.
        if matrix is not None and weight.shape == matrix.shape and weight.stride() == matrix.stride():
            if inputs_first:
                self.inputs_first.add(name)
            self.add(name, inputs, expert)

    def add(self, name: str, inputs: Tensor, expert: int | None = None) -> None:
        """Adds the inputs [..., n] of a matrix."""
        last, owner = self._last
        # The same object, not equal numbers: keys and values read what queries read.
        if inputs is last and name not in self._sums:
            self.shared[name] = owner
        if name in self.shared:
            return
        self._last = inputs, name
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        width = rows.shape[1]
        if name not in self._sums:
            shape = (width, width) if expert is None else (len(self._parameters[name]), width, width)
            self._sums[name] = torch.zeros(shape, dtype=torch.float64, device=rows.device)
        total = self._sums[name] if expert is None else self._sums[name][expert]
        total.add_(rows.T @ rows)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the sums, float32 [n, n] or [experts, n, n], by the name of the matrix."""
        return {name: total.float().cpu() for name, total in self._sums.items()}


@torch.inference_mode()
def input_grams(lm: LanguageModel, examples: Sequence[Example]) -> ModelStatistics:
    """Computes the Gram matrix X^T X of the inputs of every linear layer.

    X has a row for each token that the model reads of prompt and answer (Jin et al. 2023, arXiv:2212.09849, algorithm
    1); for an expert of a mixture, for each token that is routed to it. The output head counts, unless it shares its
    weights with the embedding, which is no linear layer.

    Args:
        lm: the model.
        examples: conversations with answers.

    Raises:
        UserError: the model has no linear layers, or no example fits its context.
    """
    sequences = encode(lm, examples)
    grams = GramMatrices(dict(lm.model.named_parameters()))
    head = untied_head(lm)
    with experts_apart(lm.model), progress_bar("Gram matrices", len(sequences), "examples") as advance:
        for sequence in sequences:
            with grams:
                hidden = hidden_states(lm, sequence)
            if head is not None:
                # By hand: the head's own forward pass would compute logits of all tokens.
                grams.add(head, hidden)
            advance(1)
    tensors = grams.tensors()
    if not tensors:
        raise UserError(
            f"models of type {lm.model.config.model_type} have no linear layers that regmean knows",
            where="method",
            fix="use fisher, or another method",
        )
    answers = sum(sequence.answer for sequence in sequences)
    first = sorted(grams.inputs_first)
    return ModelStatistics(tensors, len(sequences), answers, shared=grams.shared, inputs_first=first)


@contextmanager
def experts_apart(model: Any) -> Iterator[None]:
    """Has transformers compute fused experts by a product for each expert, which can be watched."""
    if not any(parameter.dim() == 3 for parameter in model.parameters()):
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def untied_head(lm: LanguageModel) -> str | None:
    """Returns the name of the output head's weight; None if it is the embedding's."""
    head, embedding = lm.model.get_output_embeddings(), lm.model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return None
    parameters: dict[str, Tensor] = dict(lm.model.named_parameters())
    return next(name for name, parameter in parameters.items() if parameter is head.weight)
