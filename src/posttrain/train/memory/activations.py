"""Estimate the activations that autograd keeps of a decoder layer, from what each operation saves.

A layer is ``x + attention(norm(x))`` and then ``x + feed_forward(norm(x))``. With hidden states of width d, queries q,
keys k, an inner width f, and w bytes a number (4 in float32, else 2), a token costs, where all weights are trained:

- a norm: on a CPU its input, which is float32, and the 4 bytes of its scale (``models/fused``); elsewhere its input in
  float32 (4d; in bfloat16 a copy), the normed input in the hidden states' dtype for the gradient of its weights, and
  the scale;
- linear layers that read one tensor of width n: that tensor once, wn; under autocast a copy each, 2n;
- attention: scaled queries, keys and values, w(q + 2k); of short sequences w a score and head, while the scores of long
  ones are computed again (``models/attention.py``; none are counted where a micro-batch has both); and its output,
  which the output projection reads, wq. Rotation keeps sine and cosine, which all layers share. With dropout of
  attention weights (on a CPU, torch's written-out attention in float32) queries, and keys and values for each query
  head, 12q, and of each score and head the weight, the mask and their product, 12;
- a gated feed-forward block: gate, its activation, what that is multiplied with, and the product, which the last layer
  reads, 4wf; without a gate 2wf.

Frozen weights keep no input. A LoRA adapter of rank r keeps its input, wn once for all that read the same, and its
inner values, wr; with dropout the mask and the dropped input, 2wn each. Where it is not fused
(``models/fused_lora``), peft has a float32 copy of the input for each adapter, 4n, and 4r; with dropout 8n; under
autocast 2n, 2r and 6n. Residual sums keep nothing. A part that is computed again keeps its input alone (Chen et al.
2016, arXiv:1604.06174).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from posttrain.models.attention import keeps_scores
from posttrain.models.shape import ModelShape
from posttrain.train.config import TrainConfig
from posttrain.train.lora_config import LoraConfig
from posttrain.train.memory.micro_batch import MicroBatch
from posttrain.train.memory.weights import ModelSpec, ParameterSpec

_OUTPUT_PROJECTIONS = {"o_proj", "out_proj", "dense", "c_proj", "wo"}


@dataclass(frozen=True)
class ActivationCost:
    """The activation memory of a part of a layer, and the cost of recomputing it.

    Args:
        stored: bytes that autograd stores of it.
        inputs: bytes that are stored instead if it is recomputed.
        flops: FLOPs to compute it again, up to the last operation that keeps something.
    """

    stored: int
    inputs: int
    flops: float

    @property
    def saved(self) -> int:
        """Bytes that recomputing it saves."""
        return self.stored - self.inputs


@dataclass(frozen=True)
class LayerCosts:
    """The activation memory of a decoder layer, for one micro-batch.

    Args:
        norms: all of its norms.
        attention: the attention module.
        feed_forward: the feed-forward module.
        activation: the feed-forward module, where only what follows its first products is computed again; None where
            that cannot be told apart.
        whole: the layer.
    """

    norms: ActivationCost
    attention: ActivationCost
    feed_forward: ActivationCost
    activation: ActivationCost | None
    whole: ActivationCost


@dataclass(frozen=True)
class NumberSizes:
    """Bytes of a number by use, and which operations are fused.

    Args:
        stream: hidden states, which layers add to.
        product: results of matrix products.
        autocast: whether the weights are float32 and the products are not.
        fused: whether norms and rotations are (``models/fused``).
        adapter: tensors that a fused adapter keeps; None if it is not fused.
    """

    stream: int
    product: int
    autocast: bool
    fused: bool
    adapter: int | None

    @classmethod
    def from_config(cls, config: TrainConfig, shape: ModelShape, device: str) -> "NumberSizes":
        """Derives the sizes from a training's config."""
        wide_sum = shape.rms and device == "cpu"
        fused = wide_sum and not config.compile
        autocast = config.precision == "autocast"
        wide = config.dtype == "float32"
        product = 4 if wide and not autocast else 2
        adapter = None if autocast or config.compile else product
        return cls(4 if wide or wide_sum else 2, product, autocast, fused, adapter)


def layer_costs(spec: ModelSpec, config: TrainConfig, batch: MicroBatch, device: str = "cpu") -> LayerCosts:
    """Estimates the activations of a middle layer for a micro-batch; by the adapters that keep most."""
    shape = spec.shape
    numbers = NumberSizes.from_config(config, shape, device)
    reads = _LinearInputs.from_spec(spec, config, numbers)
    tokens, hidden, inner = batch.tokens, shape.hidden, shape.inner
    stream = tokens * numbers.stream * hidden
    full = config.method == "full"

    norm = tokens * norm_bytes(shape, numbers, trained=full)
    norms = ActivationCost(shape.norms * norm, shape.norms * stream, 8.0 * shape.norms * tokens * hidden)

    inside = numbers.product * (shape.queries * batch.queries + 2 * shape.keys * batch.keys)
    if device != "cpu":  # fused kernels keep their output, which a trained projection reads, and a number a row
        inside += tokens * ((0 if full else numbers.product * shape.queries) + 4 * shape.heads)
    elif config.noise.dropout:
        inside = 12 * (shape.queries * batch.queries + shape.heads * batch.scores)
    elif keeps_scores(batch.longest, shape.head_size):
        inside += numbers.product * shape.heads * batch.scores
    if shape.head_norms:
        scales = 4 * (shape.heads + shape.kv_heads)
        # Under autocast they are in bfloat16 and the weights are not: that is not fused.
        fused = numbers.fused and not numbers.autocast
        wide = numbers.product if fused else 4 + (numbers.product if full else 0)
        inside += tokens * (wide * (shape.queries + shape.keys) + scales)
    projections = 2.0 * tokens * hidden * (shape.queries + 2 * shape.keys)
    # Two products, queries by keys and weights by values, of 2 FLOPs a number.
    scores = 4.0 * shape.queries * batch.pairs
    output = 2.0 * tokens * shape.queries * hidden
    attention = ActivationCost(
        inside + tokens * (reads.states_for_attention + reads.attended),
        stream,
        projections + scores + (output if reads.attended_adapted else 0),
    )

    widths = 3 if shape.gated else 1
    first = 2.0 * tokens * hidden * inner * (2 if shape.gated else 1)
    last = 2.0 * tokens * inner * hidden if reads.product_adapted else 0.0
    stored = tokens * (reads.states_for_feed_forward + widths * numbers.product * inner + reads.product)
    feed_forward = ActivationCost(stored, stream, first + last)
    activation = None
    if shape.separate_gate:
        inputs = tokens * (reads.states_for_feed_forward + 2 * numbers.product * inner)
        activation = ActivationCost(stored, inputs, 4.0 * tokens * inner + last)

    whole = ActivationCost(
        norms.stored + attention.stored + feed_forward.stored,
        stream,
        norms.flops + projections + scores + output + first + last,
    )
    return LayerCosts(norms, attention, feed_forward, activation, whole)


def norm_bytes(shape: ModelShape, numbers: NumberSizes, *, trained: bool) -> int:
    """Counts the bytes a token that a norm of the hidden states keeps."""
    # LayerNorm of torch keeps its input, a mean and a scale.
    if not shape.rms:
        return numbers.stream * shape.hidden + 8
    if numbers.fused:
        return numbers.stream * shape.hidden + 4
    return (4 + (numbers.stream if trained else 0)) * shape.hidden + 4


@dataclass(frozen=True)
class _LinearInputs:
    """Bytes a token of the inputs that linear layers keep, and whether the last of a module has an adapter."""

    states_for_attention: int
    attended: int
    states_for_feed_forward: int
    product: int
    attended_adapted: bool
    product_adapted: bool

    @classmethod
    def from_spec(cls, spec: ModelSpec, config: TrainConfig, numbers: NumberSizes) -> "_LinearInputs":
        if config.method == "lora" and config.lora.ranks:
            layers = [cls._from_layer(spec, config, numbers, depth) for depth in range(spec.shape.layers)]
            sizes = [asdict(layer).values() for layer in layers]
            return cls(*(max(column) for column in zip(*sizes, strict=True)))
        return cls._from_layer(spec, config, numbers, 0)

    @classmethod
    def _from_layer(cls, spec: ModelSpec, config: TrainConfig, numbers: NumberSizes, depth: int) -> "_LinearInputs":
        shape = spec.shape
        first = [weight for weight in spec.weights if weight.depth == depth and len(weight.shape) == 2]
        attention = [weight for weight in first if "attn" in weight.name or "attention" in weight.name]
        others = [weight for weight in first if weight not in attention]
        if config.method == "full":

            def copies(readers: Sequence[ParameterSpec]) -> int:
                return max(1, len(readers) - 1) if numbers.autocast else 1

            return cls(
                numbers.product * shape.hidden * copies(attention),
                numbers.product * shape.queries,
                numbers.product * shape.hidden * copies(others),
                numbers.product * shape.inner,
                False,
                False,
            )
        down = [weight for weight in attention if ".lora_A" in weight.name]
        output = [
            weight for weight in down if weight.name.split(".lora_A")[0].rpartition(".")[2] in _OUTPUT_PROJECTIONS
        ]
        into = [weight for weight in down if weight not in output]
        down = [weight for weight in others if ".lora_A" in weight.name]
        last = [weight for weight in down if weight.shape[1] == shape.inner]
        up = [weight for weight in down if weight not in last]

        def stored(readers: Sequence[ParameterSpec]) -> int:
            return _adapter_bytes(readers, config.lora, numbers)

        return cls(stored(into), stored(output), stored(up), stored(last), bool(output), bool(last))


def _adapter_bytes(readers: Sequence[ParameterSpec], config: LoraConfig, numbers: NumberSizes) -> int:
    """Counts the bytes a token that adapters with a shared input keep, from their first matrices [rank, width]."""
    if not readers:
        return 0
    width = readers[0].shape[1]
    number = numbers.adapter or (2 if numbers.autocast else 4)
    inner = sum(number * weight.shape[0] for weight in readers)
    # Dropout gives each adapter an input of its own, which it must keep with its mask.
    if config.dropout:
        return inner + len(readers) * ((numbers.adapter or 4) + number) * width
    copies = 1 if numbers.adapter or numbers.product == 4 else len(readers)
    return inner + copies * number * width
