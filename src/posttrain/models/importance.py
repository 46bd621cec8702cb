"""Measures on records how much a model needs each of its parts: by gradient, or by activations alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.models.batching import batches_by_tokens, pad
from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.shape import decoder_layers
from posttrain.store.errors import UserError
from posttrain.store.progress import progress_bar

_BATCH_TOKENS = 1024  # of a backward pass, whose activations are all held


@dataclass(frozen=True)
class Importance:
    """The importance of each layer and attention head for each record, in nats of the record's loss.

    Attributes:
        layers: float64 [records, layers].
        heads: float64 [records, layers, heads].
        tokens: int64 [records], the tokens whose loss counts.
    """

    layers: np.ndarray
    heads: np.ndarray
    tokens: np.ndarray


def importance_by_gradient(lm: LanguageModel, examples: Sequence[TokenizedExample]) -> Importance:
    """Measures the first-order change of the loss without a layer or head, in one backward pass for each record.

    Of a head |sum_t g_t . a_t|, where a_t is its output at token t and g_t the loss's gradient with respect to it
    (Michel, Levy and Neubig 2019, arXiv:1905.10650, equation 2, without their division by the norm of a layer's
    importances); of a layer the same of what it adds to its input. A record's loss is the sum over its tokens.

    Raises:
        UserError: the model's layers or heads are not known here.
    """
    layers = _layers(lm)
    heads = _head_count(lm)
    by_layer = np.zeros((len(examples), len(layers)))
    by_head = np.zeros((len(examples), len(layers), heads))
    batches = batches_by_tokens([len(example.ids) for example in examples], _BATCH_TOKENS)
    with progress_bar("measuring importance", len(examples), "records") as advance, _frozen(lm.model):
        for rows in batches:
            taken = _Activations()
            hooks = [taken.keep_output(layer) for layer in layers]
            hooks += [taken.keep_input(_output_projection(layer, lm)) for layer in layers]
            hooks.append(lm.model.get_input_embeddings().register_forward_hook(_require_gradient))
            with _hooked(*hooks):
                loss = _loss(lm, [examples[row] for row in rows])
            outputs = [taken.outputs[layer] for layer in layers]
            inputs = [taken.inputs[_output_projection(layer, lm)] for layer in layers]
            gradients = torch.autograd.grad(loss, [*outputs, *inputs])
            for number, layer in enumerate(layers):
                added = (outputs[number] - taken.before[layer]).detach()
                products = (gradients[number] * added).double().sum((1, 2))
                by_layer[rows, number] = products.abs().cpu().numpy()
                products = (gradients[len(layers) + number] * inputs[number].detach()).double()
                products = products.view(*products.shape[:2], heads, -1)
                by_head[rows, number] = products.sum((1, 3)).abs().cpu().numpy()
            advance(len(rows))
    return Importance(by_layer, by_head, np.array([sum(example.supervised[1:]) for example in examples], np.int64))


@dataclass(frozen=True)
class ActivationImportance:
    """The importance of a model's parts by their activations; heads and channels compare with those of their layer.

    Attributes:
        layers: float64 [layers], from 0 to 2.
        heads: float64 [layers, heads].
        inner: float64 [layers, channels], of the feed-forward blocks.
    """

    layers: np.ndarray
    heads: np.ndarray
    inner: np.ndarray


@torch.no_grad()
def importance_by_activation(lm: LanguageModel, examples: Sequence[TokenizedExample]) -> ActivationImportance:
    """Measures layers, attention heads and feed-forward channels in one forward pass over all tokens.

    Of a layer it is the block influence, 1 less the mean cosine of its input and output over all tokens (Men et al.
    2024, arXiv:2403.03853, equation 1). Of a head it is the norm of its output at a token, of a channel the absolute
    value of what enters the block's last matrix: their mean over the tokens of a sequence, and of these the L2 norm
    over the sequences (Muralidharan et al. 2024, arXiv:2407.14679, section 2.2 and best practice 2 of section 4.1).
    That paper's blocks have no gate, and it takes a channel's value before the activation; behind activation and gate
    it is what the channel contributes.

    Raises:
        UserError: the model's layers, heads or channels are not known here.
    """
    layers, heads = _layers(lm), _head_count(lm)
    down = [_down_projection(layer, lm) for layer in layers]
    cosines = np.zeros(len(layers))
    head_squares, inner_squares = np.zeros((len(layers), heads)), np.zeros((len(layers), down[0].in_features))
    mask = torch.ones((1, 1), dtype=torch.bool)

    def add_cosines(number: int) -> Callable[..., None]:
        def add(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            cosine = nn.functional.cosine_similarity(_hidden_states(args, kwargs).double(), output.double(), dim=-1)
            cosines[number] += float(cosine[mask].sum())

        return add

    def mean_squares(values: Tensor) -> np.ndarray:
        """Returns the squares of the means over tokens of float32 [batch, tokens, parts], summed over the batch."""
        means = (values * mask[..., None]).sum(1, dtype=torch.float64) / mask.sum(1, keepdim=True)
        squares: np.ndarray = means.square().sum(0).cpu().numpy()
        return squares

    def add_heads(number: int) -> Callable[..., None]:
        def add(module: nn.Module, args: Any) -> None:
            head_squares[number] += mean_squares(args[0].float().unflatten(-1, (heads, -1)).norm(dim=-1))

        return add

    def add_inner(number: int) -> Callable[..., None]:
        def add(module: nn.Module, args: Any) -> None:
            inner_squares[number] += mean_squares(args[0].float().abs())

        return add

    hooks = [
        hook
        for number, layer in enumerate(layers)
        for hook in (
            layer.register_forward_hook(add_cosines(number), with_kwargs=True),
            _output_projection(layer, lm).register_forward_pre_hook(add_heads(number)),
            down[number].register_forward_pre_hook(add_inner(number)),
        )
    ]
    batches = batches_by_tokens([len(example.ids) for example in examples], _BATCH_TOKENS)
    with progress_bar("measuring importance", len(examples), "records") as advance, _hooked(*hooks):
        for rows in batches:
            # No mask is needed: in a causal model the padding behind a sequence does not influence it.
            ids, lengths = pad([examples[row].ids for row in rows], lm)
            mask = torch.arange(ids.shape[1], device=lm.device) < lengths[:, None]
            lm.decoder(input_ids=ids, use_cache=False)
            advance(len(rows))
    tokens = sum(len(example.ids) for example in examples)
    return ActivationImportance(1 - cosines / tokens, np.sqrt(head_squares), np.sqrt(inner_squares))


class _Activations:
    """The outputs of modules in a forward pass."""

    def __init__(self) -> None:
        self.before: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        self.inputs: dict[nn.Module, Tensor] = {}

    def keep_output(self, module: nn.Module) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.before[module] = _hidden_states(args, kwargs)
            self.outputs[module] = output[0] if isinstance(output, tuple) else output

        return module.register_forward_hook(keep, with_kwargs=True)

    def keep_input(self, module: nn.Module) -> Any:
        def keep(module: nn.Module, args: Any) -> None:
            self.inputs[module] = args[0]

        return module.register_forward_pre_hook(keep)


def _loss(lm: LanguageModel, examples: Sequence[TokenizedExample]) -> Tensor:
    """Returns the sum of the losses of all supervised tokens."""
    ids, _ = pad([example.ids for example in examples], lm)
    supervised = torch.zeros(ids.shape, dtype=torch.bool, device=lm.device)
    for row, example in enumerate(examples):
        supervised[row, : len(example.ids)] = torch.tensor(example.supervised, device=lm.device)
    hidden = lm.decoder(input_ids=ids, use_cache=False).last_hidden_state
    at = supervised[:, 1:]  # nothing predicts the first token
    return nn.functional.cross_entropy(lm.logits(hidden[:, :-1][at]), ids[:, 1:][at], reduction="sum")


def _layers(lm: LanguageModel) -> list[nn.Module]:
    layers = decoder_layers(lm.model)
    if not layers:
        raise UserError(f"the layers of models of type {lm.model.config.model_type} are not known here", where="model")
    return list(layers)


def _head_count(lm: LanguageModel) -> int:
    return int(lm.model.config.get_text_config().num_attention_heads)


def _output_projection(layer: nn.Module, lm: LanguageModel) -> nn.Module:
    """Returns the module whose input is the outputs of a layer's heads, one after another."""
    projection = getattr(getattr(layer, "self_attn", None), "o_proj", None)
    if not isinstance(projection, nn.Module):
        raise UserError(f"the heads of models of type {lm.model.config.model_type} are not known here", where="model")
    return projection


def _down_projection(layer: nn.Module, lm: LanguageModel) -> nn.Linear:
    """Returns the last matrix of a layer's feed-forward block, whose input is the outputs of its channels."""
    projection = getattr(getattr(layer, "mlp", None), "down_proj", None)
    if not isinstance(projection, nn.Linear):
        raise UserError(f"the channels of models of type {lm.model.config.model_type} are not known", where="model")
    return projection


def _hidden_states(args: Any, kwargs: Any) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _require_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_()


@contextmanager
def _hooked(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Has no gradients of weights computed, which take most of a backward pass."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
