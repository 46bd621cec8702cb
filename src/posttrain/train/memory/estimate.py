"""Estimate the peak memory of a training by formula.

Bytes of four kinds are added up:

1. what is there all the time: weights, float32 masters and gradient sums, the optimiser's state, moving averages, the
   copy that checkpoints are written from (`static`), and on a CPU the process with its libraries;
2. activations, which the forward pass leaves for the backward pass (`activations`), and under autocast the weights in
   bfloat16, which it leaves as well;
3. the gradient of the head's weights, which is whole in low precision once; where it is the embedding too, autograd
   holds it until the gradient of the embedding comes, at the very end;
4. what the operation at hand works with, and on a CPU what is lost between tensors.

The peak is the largest of the phases: the end of the forward pass, the backward pass (the head, the last norm, a
layer), the optimiser's step, and the merging of an adapter into weights in float32; in the last two activations are
gone, and what is new fits into the space that they left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.models.head import vocabulary_chunk
from posttrain.models.shape import ModelShape
from posttrain.train.config import TrainConfig
from posttrain.train.memory.activations import NumberSizes, layer_costs, norm_bytes
from posttrain.train.memory.micro_batch import MicroBatch
from posttrain.train.memory.recompute import RecomputePolicy, layer_policies
from posttrain.train.memory.weights import (
    ModelSpec,
    ema_bytes,
    gradient_bytes,
    master_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    snapshot_bytes,
    step_bytes,
)

_LIBRARY_BYTES = 60 * 2**20  # code, threads and buffers of matrix products that come with the first of them
_DISTILLED_LOGITS = 2**23  # that a distillation works on at once


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes that a training takes on its device.

    Args:
        parameters: weights.
        masters: their float32 copies.
        gradients: float32 sums of all micro-batches, for each task where surgery keeps them apart.
        optimizer: the optimiser's state.
        averages: moving averages of the weights.
        snapshot: the copy that checkpoints are written from in the background.
        process: the interpreter and its libraries, on a CPU.
        activations: kept for the backward pass.
        holes: free memory between tensors that the C library holds, on a CPU.
        working: further bytes of each phase: ``forward``, ``backward``, ``step``,
            ``merge_adapter``.
        host: bytes in the host's memory, where training runs on an accelerator.
        recomputed: FLOPs of what a micro-batch computes again.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    averages: int
    snapshot: int
    process: int
    activations: int
    holes: int
    working: Mapping[str, int]
    host: int
    recomputed: float

    @property
    def static(self) -> int:
        """Bytes that are held all the time."""
        fixed = self.parameters + self.masters + self.gradients + self.optimizer + self.averages
        return fixed + self.snapshot + self.process

    @property
    def phases(self) -> dict[str, int]:
        """All bytes by phase."""
        return {name: self.static + sum(self._activations_in(name)) + bytes for name, bytes in self.working.items()}

    @property
    def peak(self) -> str:
        """The phase that takes the most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        """The most bytes at any time."""
        return max(self.phases.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at the peak by purpose; their sum is the total."""
        activations, holes = self._activations_in(self.peak)
        return {
            "parameters": self.parameters,
            "float32 masters": self.masters,
            "gradient sums": self.gradients,
            "optimiser state": self.optimizer,
            "averages": self.averages,
            "checkpoint copy": self.snapshot,
            "activations": activations,
            "holes between tensors": holes,
            "working memory": self.working[self.peak],
            "process": self.process,
        }

    def _activations_in(self, phase: str) -> tuple[int, int]:
        """Returns the activations held in a phase, and the fragmentation between them."""
        # The backward pass has freed the activations by then.
        return (0, 0) if phase in ("step", "merge_adapter") else (self.activations, self.holes)


def count_step_tasks(config: TrainConfig, kinds: Mapping[str, Sequence[str]] | None = None) -> int:
    """Returns the most tasks in a step whose gradients surgery keeps apart; 1 without it.

    Args:
        kinds: each record's kind, by column; None where the data are not known, of which two tasks are assumed.
    """
    column = config.surgery.task_column
    if column is None:
        return 1
    return 2 if kinds is None else min(len(set(kinds[column])), config.batch_size)


def estimate_memory(
    spec: ModelSpec, config: TrainConfig, batch: MicroBatch, *, device: str = "cpu", process: int = 0, tasks: int = 1
) -> MemoryEstimate:
    """Estimates the memory of a training.

    Args:
        spec: the model.
        config: settings of its training.
        batch: the largest micro-batch.
        device: ``cpu`` or ``cuda``.
        process: bytes of this process with its libraries and without a model (`process_bytes`).
        tasks: most tasks of a step (`count_step_tasks`), each of which has gradient sums of its own.
    """
    costs = layer_costs(spec, config, batch, device)
    policies = layer_policies(config, costs, spec.shape.layers)
    masters, state = master_bytes(spec, config), optimizer_state_bytes(spec, config.optimizer)
    sums, averages, snapshot = (
        gradient_bytes(spec) * tasks,
        ema_bytes(spec, config),
        snapshot_bytes(spec, config),
    )
    on_cpu = device == "cpu"
    offloaded = not on_cpu and config.optimizer.offload
    host = 0 if on_cpu else process + snapshot
    step = step_bytes(spec, config.optimizer)
    if offloaded:
        # Masters of adapters and float32 weights are copies there too, and each gradient lands beside its sum.
        landing = parameter_bytes(spec, config, trained=True)
        host += 4 * spec.count(trained=True) + sums + landing + state + averages + step
        masters = sums = state = averages = step = 0
    numbers = NumberSizes.from_config(config, spec.shape, device)
    activations = _activation_bytes(spec, config, batch, costs.whole.stored, policies, numbers)
    recomputed = sum(bool(policy.parts) for policy in policies)
    return MemoryEstimate(
        parameters=parameter_bytes(spec, config),
        masters=masters,
        gradients=sums,
        optimizer=state,
        averages=averages,
        snapshot=snapshot if on_cpu else 0,
        process=process + _LIBRARY_BYTES if on_cpu else 0,
        activations=activations,
        holes=_fragmentation(spec.shape, config, batch, activations, recomputed, numbers) if on_cpu else 0,
        working={
            "forward": _forward_working(spec, config, batch, numbers, device),
            "backward": _backward_working(
                spec, config, batch, max((policy.saved for policy in policies), default=0), numbers, device
            ),
            "step": step,
            "merge_adapter": _merge_adapter_working(spec, config),
        },
        host=host,
        recomputed=sum(policy.flops for policy in policies),
    )


def _activation_bytes(
    spec: ModelSpec,
    config: TrainConfig,
    batch: MicroBatch,
    layer: int,
    policies: list[RecomputePolicy],
    numbers: NumberSizes,
) -> int:
    shape = spec.shape
    total = shape.layers * layer - sum(policy.saved for policy in policies)
    norm = batch.tokens * norm_bytes(shape, numbers, trained=config.method == "full")
    attacked = config.noise.adversarial.method != "none"
    if attacked:
        total += 4 * batch.tokens * shape.hidden  # the perturbation, in float32
    elif config.method == "lora" and policies and not policies[0].parts & {"norms", "layer"}:
        total -= norm  # no gradient is needed before the first adapter, so that norm keeps nothing
    total += norm + batch.supervised * (_head_number_bytes(config) * shape.hidden + 4)
    # Sine and cosine.
    total += batch.tokens * 2 * (numbers.product if numbers.fused else numbers.stream) * shape.head_size
    # Places are 64-bit: tokens, positions, the plan of attention, and what is predicted.
    total += 8 * (3 * batch.tokens + 2 * batch.queries + batch.keys + 3 * batch.supervised)
    if config.precision == "autocast":
        total += 2 * sum(weight.count for weight in spec.weights if weight.kind == "matrix")
    return total


def _merge_adapter_working(spec: ModelSpec, config: TrainConfig) -> int:
    """Counts the bytes to merge an adapter, layer by layer in float32 (``train/lora.py``): the layer and its update."""
    if config.method != "lora":
        return 0
    largest = max(weight.count for weight in spec.weights if ".base_layer." in weight.name)
    # The update is there twice while it is scaled.
    return (8 if config.dtype == "float32" else 12) * largest


def _fragmentation(
    shape: ModelShape, config: TrainConfig, batch: MicroBatch, activations: int, recomputed: int, numbers: NumberSizes
) -> int:
    """Estimates the fragmentation of the C library's heap: bytes between tensors that it does not return.

    Tensors that are kept stand between others that are freed, and a hole takes in only what is smaller than itself, as
    torch asks for aligned memory. Where blocks come and go like this, there is about half as much in holes as in use
    (Knuth's fifty-percent rule, The Art of Computer Programming 1, section 2.5); where norms are fused and nothing else
    comes and goes between what is kept, a fifth, as measured; a third with adapters on 16-bit weights, which keep less
    of it. A layer that is computed again is freed but for its input, which stays in the midst of the space that the
    next layer is to have: the hole beside it is too small for that one's largest tensor, of the width inside a
    feed-forward block. Adapters that are not fused have two such at a time in float32, their result and the same
    scaled. The holes were compared with those of glibc's heap (``benchmarks/memory_estimate.py``).

    Args:
        activations: bytes.
        recomputed: layers that are computed again.
    """
    lora = config.method == "lora"
    peft = lora and not numbers.adapter
    largest = 8 if peft else numbers.product
    if peft or not numbers.fused:
        share = 2
    else:
        share = 3 if lora and numbers.product == 2 else 5
    return activations // share + recomputed * largest * batch.tokens * shape.inner


def _forward_working(spec: ModelSpec, config: TrainConfig, batch: MicroBatch, numbers: NumberSizes, device: str) -> int:
    """Estimates the working memory at the end of the forward pass: the last norm, or the head.

    The norm: embeddings and hidden states, which are held until the decoder returns, the normed states in their dtype
    and, where it is not fused, in float32.
    """
    shape = spec.shape
    normed = (4 if config.dtype == "float32" else 2) + (0 if numbers.fused else 4)
    states = batch.tokens * shape.hidden * (2 * numbers.stream + normed)
    return max(states, _logit_bytes(spec, config, batch, 0, device))


def _backward_working(
    spec: ModelSpec, config: TrainConfig, batch: MicroBatch, recomputed: int, numbers: NumberSizes, device: str
) -> int:
    """Estimates the working memory of the backward pass: the head, the last norm, or a layer.

    - The head: what it works with, the states' gradient in float32 and in their dtype, and the weights' gradient.
    - The last norm, a root mean square in float32: the gradient of its input by two ways, of the mean square, and
      three terms of the square's derivative, 20d a token, less the normed states, which are freed by then. Fused: the
      gradients of its output and its input.
    - A layer: the gradients of a feed-forward block's product and of its two factors, less the product, 2wf; and what
      is computed again.

    A tied head's gradient waits through the last two.
    """
    shape = spec.shape
    number = _head_number_bytes(config)
    full = config.method == "full"
    weight = number * shape.vocabulary * shape.hidden if full else 0
    logits = _logit_bytes(spec, config, batch, 4 if number == 2 else 0, device)
    head = weight + logits + batch.supervised * (4 + number) * shape.hidden
    normed = numbers.stream if full else 0
    norm = batch.tokens * shape.hidden * (20 - normed if shape.rms and not numbers.fused else 2 * numbers.stream)
    layer = batch.tokens * shape.inner * (2 * numbers.product if full or numbers.adapter else 6)
    waiting = weight if shape.tied else 0
    return max(head, waiting + max(norm, recomputed + layer))


def _logit_bytes(spec: ModelSpec, config: TrainConfig, batch: MicroBatch, gradients: int, device: str) -> int:
    """Estimates the working memory of the head: chunks of logits, the previous one included.

    Args:
        gradients: bytes of their gradients in low precision, a logit.
    """
    output, vocabulary = _objective_output(config), spec.shape.vocabulary
    # Eight float32 numbers a logit.
    if output == "logits":  # of the student and the teacher, their log-probabilities and the divergence
        return 4 * 8 * min(_DISTILLED_LOGITS, batch.supervised * vocabulary)
    if output != "log_probabilities":
        return 0
    chunk = vocabulary_chunk(batch.supervised, device)
    parts = 2 if vocabulary > chunk else 1
    low = 0 if config.precision == "float32" else 2
    return batch.supervised * (min(chunk, vocabulary) * (4 * parts + low + gradients) + 16)


def _objective_output(config: TrainConfig) -> str:
    return config.spec.output


def _head_number_bytes(config: TrainConfig) -> int:
    """Returns the bytes of a number in the head's weights as they are used."""
    return 4 if config.dtype == "float32" else 2
