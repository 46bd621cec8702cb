"""Fused norms and rotary positions, put in place of a model's own where they agree."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.fused_lora import fused_lora_forward
from posttrain.models.language_model import LanguageModel

__all__ = ["fuse_layers"]

_ROTATION = "apply_rotary_pos_emb"
"""Name under which each of transformers' model modules holds its own copy of the rotation."""

_PROBE = torch.arange(3, 19)[None]

_Rotation = Callable[..., tuple[Tensor, Tensor]]

_NUMBERS = 1 << 17  # of a block: a handful of such blocks in float32 fits the processors' caches


@contextmanager
def override_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Gives a module another forward for a while."""
    # An override on the instance hides the class's method, and an earlier override has to come back.
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def fuse_layers(lm: LanguageModel, *, compiled: bool = False) -> Iterator[None]:
    """Runs a model's adapter, and on a CPU its norms and rotations, fused; restores the model afterwards.

    An operation is replaced only if both agree on a few numbers. Where all norms are replaced, the residual stream is
    float32, as under autocast, whatever the weights' dtype: it is not rounded after each layer. Other devices have
    kernels of their own.

    Args:
        compiled: whether the layers are compiled, which fuses them; then norms are only made to take float32.
    """
    # In float32 nothing is rounded that could be kept more precisely.
    low = lm.model.dtype != torch.float32
    with ExitStack() as changed:
        if not compiled:
            for module in lm.model.modules():
                if forward := fused_lora_forward(module):
                    changed.enter_context(override_forward(module, forward))
        if lm.device.type == "cpu" and (low or not compiled):
            norm = rms_norm_reference if compiled else rms_norm
            norms = {module: _norm_forward(module, norm) for module in lm.decoder.modules() if _is_norm(module)}
            for module, forward in norms.items():
                if forward:
                    changed.enter_context(override_forward(module, forward))
            # Layers call the rotation by its name in their module, so the name is what has to be replaced.
            for home in {sys.modules[type(module).__module__] for module in lm.decoder.modules()}:
                if hasattr(home, _ROTATION):
                    changed.enter_context(_replace_rotation(home, _narrow_rotation if compiled else _fused_rotation))
            # A norm that stays would get float32 states where its weights are 16 bits wide.
            if norms and all(norms.values()) and low:
                changed.enter_context(_float32_norms(list(norms)))
                changed.enter_context(_float32_residuals(lm))
        yield


@contextmanager
def _float32_norms(norms: Sequence[Any]) -> Iterator[None]:
    """Keeps the weights of norms in float32."""
    # They lie near 1, where bfloat16 has steps of 0.004 to 0.008: most updates would be rounded away.
    low = [norm.weight.dtype for norm in norms]
    for norm in norms:
        norm.weight.data = norm.weight.data.float()
    try:
        yield
    finally:
        for norm, dtype in zip(norms, low, strict=True):
            norm.weight.data = norm.weight.data.to(dtype)


@contextmanager
def _float32_residuals(lm: LanguageModel) -> Iterator[None]:
    """Has the layers add to float32 states, if they can."""

    def to_float32(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output.float()

    # Small enough to cost nothing, and valid in a vocabulary of any size.
    probe = _PROBE.clamp(max=int(lm.model.config.get_text_config().vocab_size) - 1)

    def states() -> Tensor:
        output: Tensor = lm.decoder(input_ids=probe, use_cache=False).last_hidden_state
        return output[0]

    # A sum takes the wider dtype of its terms: float32 embeddings make all states between the layers float32.
    decoder: Any = lm.decoder
    embeddings = decoder.get_input_embeddings()
    training = lm.model.training
    lm.model.eval()
    with torch.no_grad():
        before = states()
        hook = embeddings.register_forward_hook(to_float32)
        try:
            after = states()
            apart = (after - before).norm(dim=1) / before.norm(dim=1)
            # Rounding moves states by a few percent; more means that a layer does something else with float32.
            if after.dtype != before.dtype or apart.median() > 0.2:
                hook.remove()
        except RuntimeError:  # a layer without a norm before it gets float32 states for its 16-bit weights
            hook.remove()
        finally:
            lm.model.train(training)
    try:
        yield
    finally:
        hook.remove()


def _norm_forward(module: Any, norm: Callable[..., Tensor]) -> Callable[[Tensor], Tensor] | None:
    """Returns a forward that replaces a module's own norm; None if the two disagree."""
    original = module.forward
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    # A bias or a second weight would be left out by the fused norm.
    if epsilon is None or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None

    low = module.weight.dtype

    def forward(states: Tensor) -> Tensor:
        # Such as float16 states under autocast of a bfloat16 model: the module knows what to do.
        if states.dtype not in (low, torch.float32):
            normed: Tensor = original(states)
            return normed
        return norm(states, module.weight, epsilon, low)

    return forward if _norms_agree(module, forward) else None


@torch.no_grad()
def _norms_agree(module: Any, forward: Callable[[Tensor], Tensor]) -> bool:
    # Gemma, for one, multiplies by 1 + weight: names alone do not say what a norm computes.
    probe = torch.linspace(-2, 2, 2 * len(module.weight)).view(1, 2, -1).to(module.weight.dtype)
    return torch.allclose(module(probe), forward(probe), rtol=0.02, atol=1e-6)


@contextmanager
def _replace_rotation(home: Any, instead: Callable[[_Rotation], _Rotation]) -> Iterator[None]:
    """Replaces the function by which a module of transformers rotates queries and keys."""
    own = getattr(home, _ROTATION)
    rotation = instead(own)
    if list(inspect.signature(own).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"] or not _rotations_agree(
        own, rotation
    ):
        yield
        return
    setattr(home, _ROTATION, rotation)
    try:
        yield
    finally:
        setattr(home, _ROTATION, own)


def _fused_rotation(own: _Rotation) -> _Rotation:
    """The fused rotation; sine and cosine are brought into the queries' dtype once for all layers."""
    cached: tuple[Tensor | None, list[Tensor]] = (None, [])  # which all layers are given

    def rotation(
        queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        # Partial rotary embeddings rotate the first numbers of a head only.
        if cosine.shape[-1] != queries.shape[-1]:
            return own(queries, keys, cosine, sine, unsqueeze_dim=unsqueeze_dim)
        nonlocal cached
        if cached[0] is not cosine or cached[1][0].dtype != queries.dtype:
            cached = cosine, [part.unsqueeze(unsqueeze_dim).to(queries.dtype) for part in (cosine, sine)]
        return rotate(queries, *cached[1]), rotate(keys, *cached[1])

    return rotation


def _narrow_rotation(own: _Rotation) -> _Rotation:
    """A model's own rotation, of which queries and keys come in the dtype that they had."""

    def rotation(
        queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return own(queries, keys, cosine.to(queries.dtype), sine.to(queries.dtype), unsqueeze_dim=unsqueeze_dim)

    return rotation


def _rotations_agree(own: _Rotation, other: _Rotation) -> bool:
    """Returns whether two rotations agree."""
    angles = torch.arange(12.0).view(1, 3, 4).repeat(1, 1, 2)
    probe = torch.linspace(-2, 2, 48).view(1, 2, 3, 8), torch.linspace(-1, 3, 24).view(1, 1, 3, 8)
    try:
        pairs = zip(own(*probe, angles.cos(), angles.sin()), other(*probe, angles.cos(), angles.sin()), strict=True)
    except RuntimeError:  # it is given angles for half of the numbers
        return False
    return all(torch.allclose(expected, actual, atol=1e-6) for expected, actual in pairs)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Computes ``weight * states / sqrt(mean(states ** 2) + epsilon)`` in float32 (arXiv:1910.07467, equation 4).

    It keeps its input for the backward pass and nothing else.

    Args:
        states: [..., D].
        weight: [D].
        dtype: dtype of the result.

    Returns:
        [..., D].
    """
    normed: Tensor = _RmsNorm.apply(states, weight, epsilon, dtype)  # type: ignore[no-untyped-call]
    return normed


def rms_norm_reference(states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """The same as `rms_norm` in operations that a compiler fuses."""
    wide = states.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(dtype)


class _RmsNorm(torch.autograd.Function):
    """With n = x / rms and p = g * n: the weight's gradient is the sum of p, x's is (g * w - n * mean(p * w)) / rms."""

    @staticmethod
    def forward(context: Any, states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        rows = states.reshape(-1, states.shape[-1])
        output = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        inverse = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
        for block in row_blocks(rows):
            chunk = rows[block].to(torch.float32, copy=True)
            # A norm needs no squared copy of the block, which a mean of squares would write.
            scale = torch.linalg.vector_norm(chunk, dim=-1, keepdim=True).square_().div_(rows.shape[1])
            inverse[block] = scale.add_(epsilon).rsqrt_()
            output[block] = chunk.mul_(inverse[block]).mul_(weight)
        context.save_for_backward(states, weight, inverse)
        return output.view(states.shape)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        states, weight, inverse = context.saved_tensors
        width = states.shape[-1]
        rows, above = states.reshape(-1, width), gradient.reshape(-1, width)
        of_rows, wide = torch.empty_like(rows), weight.float()
        # A sum over all tokens: in bfloat16 small terms would be lost.
        of_weight = torch.zeros(width, dtype=torch.float32, device=rows.device)
        for block in row_blocks(rows):
            normed = rows[block].to(torch.float32, copy=True).mul_(inverse[block])
            chunk = above[block].to(torch.float32, copy=True)
            product = chunk * normed
            of_weight += product.sum(0)
            share = torch.mv(product, wide).div_(-width)
            of_rows[block] = chunk.mul_(wide).addcmul_(normed, share[:, None]).mul_(inverse[block])
        return of_rows.view(states.shape), of_weight.to(weight.dtype), None, None


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates each pair of numbers (x[i], x[i + D / 2]) by its angle (RoPE, arXiv:2104.09864, equation 34).

    Args:
        states: [B, H, T, D], in any memory order.
        cosine, sine: [B or 1, 1, T, D] of the angles, the second half of D as the first.

    Returns:
        [B, H, T, D], in the same memory order.
    """
    rotated: Tensor = _Rotate.apply(states, cosine, sine)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        context.save_for_backward(cosine, sine)
        return _rotate_pairs(states, cosine, sine, 1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        cosine, sine = context.saved_tensors
        return _rotate_pairs(gradient, cosine, sine, -1), None, None


def _rotate_pairs(states: Tensor, cosine: Tensor, sine: Tensor, direction: int) -> Tensor:
    half = states.shape[-1] // 2
    first, second = states[..., :half], states[..., half:]
    cosine, sine = cosine[..., :half], sine[..., :half]
    # Written in place, half by half: transformers' own concatenates a negated copy first.
    rotated = torch.empty_like(states)
    torch.mul(first, cosine, out=rotated[..., :half]).addcmul_(second, sine, value=-direction)
    torch.mul(second, cosine, out=rotated[..., half:]).addcmul_(first, sine, value=direction)
    return rotated


def row_blocks(rows: Tensor) -> Iterator[slice]:
    """Yields slices of a matrix [N, D] that are worked on while they are in the cache."""
    count = max(1, _NUMBERS // rows.shape[1])
    for start in range(0, len(rows), count):
        yield slice(start, start + count)


def _is_norm(module: nn.Module) -> bool:
    # By its class's name: transformers' RMSNorms, one in each family's file, have no common base class.
    return "norm" in type(module).__name__.lower()
