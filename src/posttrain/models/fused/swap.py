"""Put the fused operations in the place of a model's own, where they give what those give."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from posttrain.models.fused.adapter import adapted_forward
from posttrain.models.fused.norm import rms_norm, written_out
from posttrain.models.fused.rotary import rotate
from posttrain.models.language_model import LanguageModel
from posttrain.models.layers import with_forward
from posttrain.models.shape import is_norm

_ROTATION = "apply_rotary_pos_emb"
"""What transformers' models call their own copy of the same function."""
_PROBE = torch.arange(3, 19)[None]


@contextmanager
def fused(lm: LanguageModel, *, compiled: bool = False) -> Iterator[None]:
    """Have a model run its adapter, and on a CPU its norms and rotations, fused, and leave it as it was.

    What takes an operation's place has been compared with it on a few numbers; what is not known stays. Where all norms
    are replaced, what the layers add up for each token is kept in float32, as it is under autocast, whatever the
    weights are in: it is not rounded after each layer. Other devices have kernels of their own.

    Args:
        compiled: whether the layers are compiled, which fuses them; then norms are only made to take float32.
    """
    low = lm.model.dtype != torch.float32
    with ExitStack() as changed:
        if not compiled:
            for module in lm.model.modules():
                if forward := adapted_forward(module):
                    changed.enter_context(with_forward(module, forward))
        if lm.device.type == "cpu" and (low or not compiled):
            norm = written_out if compiled else rms_norm
            norms = {module: _norm_forward(module, norm) for module in lm.decoder.modules() if is_norm(module)}
            for module, forward in norms.items():
                if forward:
                    changed.enter_context(with_forward(module, forward))
            for home in {sys.modules[type(module).__module__] for module in lm.decoder.modules()}:
                if hasattr(home, _ROTATION):
                    changed.enter_context(_rotating(home, _narrowed if compiled else _remembering))
            if norms and all(norms.values()) and low:
                changed.enter_context(_wide(list(norms)))
                changed.enter_context(_wide_sum(lm))
        yield


@contextmanager
def _wide(norms: Sequence[Any]) -> Iterator[None]:
    """Keep the weights of norms in float32: near 1, in 16 bits they would hardly ever show an update."""
    low = [norm.weight.dtype for norm in norms]
    for norm in norms:
        norm.weight.data = norm.weight.data.float()
    try:
        yield
    finally:
        for norm, dtype in zip(norms, low, strict=True):
            norm.weight.data = norm.weight.data.to(dtype)


@contextmanager
def _wide_sum(lm: LanguageModel) -> Iterator[None]:
    """Have the layers add to float32 states, if they can."""

    def widened(module: Any, given: Any, found: Tensor) -> Tensor:
        return found.float()

    probe = _PROBE.clamp(max=int(lm.model.config.get_text_config().vocab_size) - 1)

    def states() -> Tensor:
        found: Tensor = lm.decoder(input_ids=probe, use_cache=False).last_hidden_state
        return found[0]

    decoder: Any = lm.decoder
    embeddings = decoder.get_input_embeddings()
    training = lm.model.training
    lm.model.eval()
    with torch.no_grad():
        before = states()
        hook = embeddings.register_forward_hook(widened)
        try:
            after = states()
            apart = (after - before).norm(dim=1) / before.norm(dim=1)
            if after.dtype != before.dtype or apart.median() > 0.2:
                hook.remove()
        except RuntimeError:  # a layer is given what its weights are not in
            hook.remove()
        finally:
            lm.model.train(training)
    try:
        yield
    finally:
        hook.remove()


def _norm_forward(module: Any, norm: Callable[..., Tensor]) -> Callable[[Tensor], Tensor] | None:
    """What gives what a module's own norm gives; None where it is another norm."""
    own = module.forward
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if epsilon is None or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None

    low = module.weight.dtype

    def forward(states: Tensor) -> Tensor:
        if states.dtype not in (low, torch.float32):
            found: Tensor = own(states)
            return found
        return norm(states, module.weight, epsilon, low)

    return forward if _agree(module, forward) else None


@torch.no_grad()
def _agree(module: Any, forward: Callable[[Tensor], Tensor]) -> bool:
    probe = torch.linspace(-2, 2, 2 * len(module.weight)).view(1, 2, -1).to(module.weight.dtype)
    return torch.allclose(module(probe), forward(probe), rtol=0.02, atol=1e-6)


_Rotation = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def _rotating(home: Any, instead: Callable[[_Rotation], _Rotation]) -> Iterator[None]:
    """Replace the function by which a module of transformers rotates queries and keys."""
    own = getattr(home, _ROTATION)
    turned = instead(own)
    if list(inspect.signature(own).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"] or not _turn(own, turned):
        yield
        return
    setattr(home, _ROTATION, turned)
    try:
        yield
    finally:
        setattr(home, _ROTATION, own)


def _remembering(own: _Rotation) -> _Rotation:
    """The fused rotation; sine and cosine are brought into the queries' dtype once for all layers."""
    known: tuple[Tensor | None, list[Tensor]] = (None, [])  # which all layers are given

    def turned(
        queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if cosine.shape[-1] != queries.shape[-1]:
            return own(queries, keys, cosine, sine, unsqueeze_dim=unsqueeze_dim)
        nonlocal known
        if known[0] is not cosine or known[1][0].dtype != queries.dtype:
            known = cosine, [part.unsqueeze(unsqueeze_dim).to(queries.dtype) for part in (cosine, sine)]
        return rotate(queries, *known[1]), rotate(keys, *known[1])

    return turned


def _narrowed(own: _Rotation) -> _Rotation:
    """A model's own rotation, of which queries and keys come in the dtype that they had."""

    def turned(
        queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return own(queries, keys, cosine.to(queries.dtype), sine.to(queries.dtype), unsqueeze_dim=unsqueeze_dim)

    return turned


def _turn(own: _Rotation, other: _Rotation) -> bool:
    """Whether two rotations agree."""
    angles = torch.arange(12.0).view(1, 3, 4).repeat(1, 1, 2)
    probe = torch.linspace(-2, 2, 48).view(1, 2, 3, 8), torch.linspace(-1, 3, 24).view(1, 1, 3, 8)
    try:
        found = zip(own(*probe, angles.cos(), angles.sin()), other(*probe, angles.cos(), angles.sin()), strict=True)
    except RuntimeError:  # it is given angles for half of the numbers
        return False
    return all(torch.allclose(one, two, atol=1e-6) for one, two in found)
