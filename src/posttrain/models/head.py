"""Hidden states and log-probabilities of packed tokens, the output head a part of the vocabulary at a time.

The logits are never in memory whole. The gradient of a plain head is computed by hand from the softmax, each part of
the weights' gradient written once. Other heads (scaled or capped logits) are computed twice, a few rows at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.models.language_model import LanguageModel

if TYPE_CHECKING:
    from posttrain.models.packing import Packed

_ROW_CHUNK = 256
_VOCABULARY_CHUNK = 2048
_ACCELERATOR_LOGITS = 2**27  # of a part of the vocabulary: half a gigabyte in float32
_LOGITS = 2**23  # in memory at once

_Result = TypeVar("_Result")


def predicting_states(lm: LanguageModel, packed: "Packed") -> Tensor:
    """Hidden states [S, D] at the indices that predict a supervised token."""
    return _select_predicting(_forward(lm, packed).last_hidden_state, packed)


def predicting_states_of_layers(lm: LanguageModel, packed: "Packed", layers: Sequence[int]) -> list[Tensor]:
    """Hidden states [S, D] of several layers: 0 is what the first one reads, and -1 is what ``read`` gives."""
    states = _forward(lm, packed, output_hidden_states=True).hidden_states
    return [_select_predicting(states[layer], packed) for layer in layers]


def token_log_probabilities(lm: LanguageModel, states: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target after its hidden state, with its graph.

    Args:
        states: [N, D], hidden states.
        targets: int64 [N], the tokens that follow.

    Returns:
        float32 [N], nats.
    """
    return _log_probabilities(lm, states, targets, False)[0]


def token_and_mean_log_probabilities(lm: LanguageModel, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `token_log_probabilities` and the mean log-probability over the vocabulary.

    The second is what label smoothing mixes in (C. Szegedy et al., 2016, arXiv:1512.00567, section 7): torch's
    ``cross_entropy(label_smoothing=e)`` is the mean of ``-(1 - e) first - e second``.

    Returns:
        Two float32 [N], nats.
    """
    log_probabilities, mean = _log_probabilities(lm, states, targets, True)
    assert mean is not None
    return log_probabilities, mean


def map_logits(lm: LanguageModel, states: Tensor, function: Callable[[Tensor, slice], _Result]) -> list[_Result]:
    """Applies a function to the logits of a few rows at a time; they are recomputed for the gradient.

    Args:
        states: [N, D], hidden states.
        function: takes float32 logits [n, V] and the rows that they are of.
    """

    def apply(chunk: Tensor, rows: slice) -> _Result:
        return function(lm.logits(chunk), rows)

    count = max(1, _LOGITS // int(lm.model.config.get_text_config().vocab_size))
    parts = [slice(start, min(start + count, len(states))) for start in range(0, len(states), count)]
    return [checkpoint(apply, states[part], part, use_reentrant=False) for part in parts]


def vocabulary_chunk(rows: int, device: str) -> int:
    """Returns how many tokens of the vocabulary the log-probabilities of so many states are computed over at once.

    Args:
        device: torch's name of the device's kind, such as ``cpu``.
    """
    if device == "cpu":
        return _VOCABULARY_CHUNK  # a processor's caches hold a small part
    # An accelerator passes over all states again for each part, so it gets few. Of a width that is not a multiple of a
    # power of two, an H100 multiplies by kernels of older cards, in four times the time.
    parts = _ACCELERATOR_LOGITS // (max(1, rows) * _VOCABULARY_CHUNK)
    return _VOCABULARY_CHUNK * max(1, parts)


def _log_probabilities(
    lm: LanguageModel, states: Tensor, targets: Tensor, with_mean: bool
) -> tuple[Tensor, Tensor | None]:
    weight = _plain_weight(lm)
    if weight is not None:
        # A custom autograd function gets no automatic casts, so autocast's dtype is read here.
        if torch.is_autocast_enabled(states.device.type):
            dtype = torch.get_autocast_dtype(states.device.type)
        else:
            dtype = weight.dtype
            states = states.to(dtype)
        result: tuple[Tensor, Tensor | None] = _LogProbabilities.apply(  # type: ignore[no-untyped-call]
            states, weight, targets, with_mean, dtype, lm.compiled
        )
        return result
    parts = [
        checkpoint(
            # Recomputed in the backward pass: a model's own scaling or capping has no gradient written by hand.
            _log_probabilities_from_logits,
            lm,
            states[start : start + _ROW_CHUNK],
            targets[start : start + _ROW_CHUNK],
            with_mean,
            use_reentrant=False,
        )
        for start in range(0, len(states), _ROW_CHUNK)
    ]
    whole = torch.cat(parts, 1) if parts else states.new_zeros(1 + with_mean, 0, dtype=torch.float32)
    return whole[0], whole[1] if with_mean else None


def _plain_weight(lm: LanguageModel) -> Tensor | None:
    """Returns the head's weights [V, D] if the logits are hidden states times these, else None.

    The one place that reads them outside of their module, which may hold them in parts.
    """
    head, config = lm.model.get_output_embeddings(), lm.model.config.get_text_config()
    changed = any(getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"))
    return head.weight if type(head) is nn.Linear and head.bias is None and not changed else None


def _log_probabilities_from_logits(lm: LanguageModel, states: Tensor, targets: Tensor, with_mean: bool) -> Tensor:
    log_probabilities = lm.logits(states).log_softmax(-1)
    chosen = log_probabilities.gather(-1, targets[:, None])[:, 0]
    return torch.stack([chosen, log_probabilities.mean(-1)] if with_mean else [chosen])


class _LogProbabilities(torch.autograd.Function):
    """log softmax(states @ weight.T)[target]; the gradient of logit v is g (1[v = target] - p_v).

    Its mean over the vocabulary of V, where it is wanted, has the gradient h (1 / V - p_v). Both passes multiply in one
    dtype, as probabilities would not add up to 1 if logits were more precise than their sum; autocast, which is off
    while gradients are computed, is not left to choose it. Where the model's layers are compiled, so is what passes
    over the logits.
    """

    @staticmethod
    def forward(
        context: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        with_mean: bool,
        dtype: torch.dtype,
        compiled: bool,
    ) -> tuple[Tensor, Tensor | None]:
        chosen = torch.zeros(len(states), dtype=torch.float32, device=states.device)
        # The online softmax (M. Milakov, N. Gimelshein, 2018, arXiv:1805.02867, algorithm 3): a running maximum and a
        # sum relative to it.
        largest = torch.full_like(chosen, -torch.inf)
        total = torch.zeros_like(chosen)
        every = torch.zeros_like(chosen) if with_mean else None
        add = _compiled(_add_exponentials) if compiled else _add_exponentials
        low = states.to(dtype)
        with torch.autocast(states.device.type, enabled=False):
            for logits, _, columns, rows in _vocabulary_chunks(low, weight, targets):
                chosen[rows] = logits[rows, targets[rows] - columns.start].float()
                if every is not None:
                    every += logits.sum(1, dtype=torch.float32)
                largest, total = add(logits, largest, total)
        total = total.log_().add_(largest)
        # Kept are N numbers rather than N by V probabilities, which the backward pass computes again from them.
        context.save_for_backward(states, weight, targets, total)
        context.dtype, context.compiled = dtype, compiled
        return chosen - total, None if every is None else every.div_(len(weight)).sub_(total)

    @staticmethod
    def backward(context: Any, gradient: Tensor, of_mean: Tensor | None) -> Any:
        states, weight, targets, total = context.saved_tensors
        with torch.autocast(states.device.type, enabled=False):
            of_states, of_weight = _gradients(
                states.to(context.dtype),
                weight,
                targets,
                total,
                gradient,
                of_mean,
                context.needs_input_grad[1],
                context.compiled,
            )
        return of_states.to(states.dtype), of_weight, None, None, None, None


def _add_exponentials(logits: Tensor, largest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest logit of each row so far, and the sum of exponentials relative to it; may change all."""
    values = logits.float()
    # Subtracting the maximum keeps exp from overflowing; the sum so far is rescaled to the new one.
    highest = torch.maximum(largest, values.amax(1))
    total = total.mul_((largest - highest).exp_()).add_(values.sub_(highest[:, None]).exp_().sum(1))
    return highest, total


def _softmax_less_one_hot(logits: Tensor, total: Tensor, targets: Tensor) -> Tensor:
    """Returns the gradient of each row's negative log-probability with respect to its logits, in their dtype.

    Args:
        logits: [N, n], of a part of the vocabulary.
        total: float32 [N], the logarithm of the sum of all exponentials.
        targets: int64 [N], counted from the part's first token; others lie outside of it.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    probabilities = (logits.float() - total[:, None]).exp()
    return torch.where(columns == targets[:, None], probabilities - 1, probabilities).to(logits.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _gradients(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    total: Tensor,
    gradient: Tensor,
    of_mean: Tensor | None,
    with_weight: bool,
    compiled: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of the states in float32 and of the weights in their dtype."""
    dtype = states.dtype
    # Summed over dozens of parts of the vocabulary, hence float32.
    of_states = torch.zeros(states.shape, dtype=torch.float32, device=states.device)
    of_weight = torch.empty_like(weight) if with_weight else None
    # What a whole row of logits is multiplied by is applied to the narrow states instead, where it cannot overflow.
    narrow = of_mean is None and dtype != torch.float16
    read = (states * -gradient[:, None]).to(dtype) if narrow else states
    for logits, weights, columns, rows in _vocabulary_chunks(states, weight, targets):
        if narrow and compiled:
            low = _compiled(_softmax_less_one_hot)(logits, total, targets - columns.start)
        else:
            # As above, by indices: without a compiler a comparison of all logits would be passes of its own.
            part = logits.float().sub_(total[:, None]).exp_()
            if narrow:
                part[rows, targets[rows] - columns.start] -= 1  # the factor of each row comes at the end
            else:
                part.mul_(-(gradient if of_mean is None else gradient + of_mean)[:, None])
                if of_mean is not None:
                    part.add_((of_mean / len(weight))[:, None])
                part[rows, targets[rows] - columns.start] += gradient[rows]
            low = part.to(dtype)
            del part
        of_states += low @ weights
        if of_weight is not None and weight.dtype == dtype:
            # Each part of the weights has its own rows of the gradient, so nothing is added up.
            torch.matmul(low.T, read, out=of_weight[columns])
        elif of_weight is not None:
            of_weight[columns] = low.T @ read
        del logits, low, weights  # before the next ones are made
    if narrow:
        of_states.mul_(-gradient[:, None])
    return of_states, of_weight


def _vocabulary_chunks(
    states: Tensor, weight: Tensor, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor, slice, Tensor]]:
    """Yields logits of a part of the vocabulary, its weights, which part, and the rows with a target in it.

    Logits and weights are in the states' dtype.
    """
    chunk = vocabulary_chunk(len(states), states.device.type)
    starts = range(0, len(weight), chunk)
    # Sorted once: to search the targets for each part would wait for the device each time.
    order = targets.argsort()
    bounds = torch.searchsorted(targets[order], torch.tensor([*starts, len(weight)], device=targets.device)).tolist()
    for start, first, last in zip(starts, bounds[:-1], bounds[1:], strict=True):
        columns = slice(start, min(start + chunk, len(weight)))
        weights = weight[columns].to(states.dtype)
        yield states @ weights.T, weights, columns, order[first:last]


def _forward(lm: LanguageModel, packed: "Packed", **more: Any) -> Any:
    if not packed.padded:
        options = {"position_ids": packed.positions, "plan": packed.plan}
        return lm.decoder(input_ids=packed.ids, **options, use_cache=False, **more)
    # Padded rows are planned as one group, whose queries are the padded matrix itself.
    (rows,) = packed.plan.groups
    mask = torch.zeros_like(rows.queries).view(-1).index_fill_(0, packed.plan.inverse, 1).view_as(rows.queries)
    return lm.decoder(input_ids=packed.ids[0][rows.queries], attention_mask=mask, use_cache=False, **more)


def _select_predicting(hidden: Tensor, packed: "Packed") -> Tensor:
    """The rows of hidden states [B, T, D] that predict a supervised token."""
    indices = packed.plan.inverse[packed.predicting] if packed.padded else packed.predicting
    return hidden.flatten(0, 1).index_select(0, indices)
