"""The training loop: exact resume, sums and counts, float32 where it matters."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from posttrain.models.chat import Encoded
from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import WorkError
from posttrain.store.progress import task
from posttrain.train.checkpoint import Checkpoint, Checkpoints
from posttrain.train.config import TrainConfig
from posttrain.train.examples import epoch_order, micro_batches
from posttrain.train.optimizer import MasterAdamW
from posttrain.train.schedule import rate
from posttrain.train.sft import sft


@dataclass(frozen=True)
class Step:
    """One optimiser step: loss in nats a supervised token, gradient norm before clipping, tokens without padding."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    rate: float
    tokens: int
    supervised_tokens: int


def fit(lm: LanguageModel, examples: Sequence[Encoded], config: TrainConfig, seed: int, scratch: Path) -> list[Step]:
    """Train ``lm`` in place, going on from the newest good checkpoint in ``scratch``.

    The result does not depend on when or how often the training was killed.

    Returns:
        The log of all steps.

    Raises:
        WorkError: if the loss or the gradient is no longer finite.
    """
    lengths = [len(example.ids) for example in examples]
    batches = [
        (epoch, rows) for epoch in range(config.epochs) for rows in epoch_order(lengths, config.batch_size, seed, epoch)
    ]
    optimizer = MasterAdamW(lm.model, config)
    checkpoints = Checkpoints(scratch / "checkpoints")
    torch.manual_seed(seed)
    steps = _resume(optimizer, checkpoints)
    lm.model.train()
    saved = time.monotonic()
    with task("training", len(batches), "steps") as advance:
        advance(len(steps))
        for number in range(len(steps), len(batches)):
            epoch, rows = batches[number]
            loss, count = _accumulate(lm, examples, rows, config)
            norm = optimizer.step(rate(config, number, len(batches)))
            if not (loss < float("inf") and norm < float("inf")):
                raise WorkError(f"training diverged at step {number}: loss {loss:.3g}, gradient norm {norm:.3g}")
            tokens = sum(lengths[row] for row in rows)
            steps.append(Step(number, epoch, loss, norm, rate(config, number, len(batches)), tokens, count))
            advance(1)
            if time.monotonic() - saved >= config.checkpoint_seconds and number + 1 < len(batches):
                _save(optimizer, checkpoints, steps)
                saved = time.monotonic()
    optimizer.close()
    lm.model.eval()
    return steps


def _accumulate(
    lm: LanguageModel, examples: Sequence[Encoded], rows: Sequence[int], config: TrainConfig
) -> tuple[float, int]:
    """Add up the gradients of one step's micro-batches: the gradient of the mean loss over all supervised tokens."""
    batches = list(micro_batches(examples, rows, config.micro_batch_tokens, lm))
    count = sum(batch.count for batch in batches)
    total = 0.0
    for batch in batches:
        with _autocast(lm, config):
            loss = sft(lm, batch)
        (loss.sum / max(count, 1)).backward()  # type: ignore[no-untyped-call]
        total += loss.sum.item()
    return total / max(count, 1), count


def _autocast(lm: LanguageModel, config: TrainConfig) -> contextlib.AbstractContextManager[object]:
    if config.precision == "autocast":
        return torch.autocast(lm.device.type, torch.bfloat16)
    return contextlib.nullcontext()


def _save(optimizer: MasterAdamW, checkpoints: Checkpoints, steps: list[Step]) -> None:
    random = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["random.cuda"] = torch.cuda.get_rng_state()
    state = {"steps": [asdict(step) for step in steps]}
    checkpoints.save(len(steps), Checkpoint(optimizer.state() | random, state))


def _resume(optimizer: MasterAdamW, checkpoints: Checkpoints) -> list[Step]:
    checkpoint = checkpoints.latest()
    if checkpoint is None:
        return []
    optimizer.load(checkpoint.tensors)
    torch.set_rng_state(checkpoint.tensors["random.cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(checkpoint.tensors["random.cuda"])
    return [Step(**step) for step in checkpoint.state["steps"]]
