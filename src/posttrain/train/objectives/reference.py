"""Log-probabilities under the reference model: computed once before training, kept in a file."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Unit, pack
from posttrain.store.files import write_atomically
from posttrain.store.hashing import digest
from posttrain.store.progress import progress_bar
from posttrain.train.checkpoint import format
from posttrain.train.checkpoint.format import byte_view
from posttrain.train.data.units import count_supervised, group_by_tokens, tokens_digest
from posttrain.train.objectives.base import evaluation_mode
from posttrain.train.objectives.log_probs import sequence_log_probs
from posttrain.train.out_of_memory import run_in_groups

log = logging.getLogger("posttrain")

_FORMAT, _NAME = 1, "log_probabilities"


def reference_log_probs(
    lm: LanguageModel,
    units: Sequence[Unit],
    folder: Path,
    tokens: int,
    *,
    padded: bool,
    parts: Iterable[Sequence[int]] = (),
) -> Tensor:
    """Log-probabilities of the units' sequences under the weights that training starts from.

    They are kept in a file under the digest of weights and tokens, and taken from it where it is whole. With an adapter
    too: it could be switched off at each step instead, but that reads every unit once an epoch, and this once.

    Args:
        units: N of K sequences each.
        folder: where the file lies.
        tokens: how many are in memory at once.
        padded: whether the model must be given padded rows.
        parts: micro-batches that are read as they are, so that a training which reads them so again rounds alike: in
            bfloat16 an answer's log-probability hangs on its neighbours by tenths of a nat. Other units follow.

    Returns:
        float32 [N, K], nats.
    """
    precision = str(torch.get_autocast_dtype(lm.device.type)) if torch.is_autocast_enabled(lm.device.type) else "own"
    key = digest([_FORMAT, weights_digest(lm.model), tokens_digest(units), precision])
    file = folder / f"reference-{key[:16]}.safetensors"
    kept = _load_cached(file, [len(units), len(units[0])])
    if kept is None:
        kept = _compute(lm, units, tokens, padded, parts)
        write_atomically(file, _serialise(kept))
    return kept


@torch.no_grad()
def _compute(
    lm: LanguageModel, units: Sequence[Unit], tokens: int, padded: bool, parts: Iterable[Sequence[int]]
) -> Tensor:
    found = torch.full((len(units), len(units[0])), torch.nan)

    def missing(rows: Sequence[int]) -> list[int]:
        return [row for row in rows if found[row, 0].isnan()]

    def read(rows: Sequence[int]) -> Tensor:
        packed = pack([units[row] for row in rows], lm.device, padded=padded)
        return sequence_log_probs(lm, packed).sums.cpu().view(len(rows), -1)

    wanted = (rows for rows in chain(parts, _remaining_groups(units, tokens, missing)) if missing(rows))
    with (
        evaluation_mode(lm.model),
        _without_adapter(lm),
        progress_bar("reading the reference", len(units), "examples") as advance,
    ):
        for rows, sums in run_in_groups(units, wanted, read):
            fresh = set(missing(rows))
            for row, its in zip(rows, sums, strict=True):
                if row in fresh:
                    found[row] = its
            advance(len(fresh))
    return found


def _remaining_groups(
    units: Sequence[Unit], tokens: int, missing: Callable[[Sequence[int]], list[int]]
) -> Iterator[Sequence[int]]:
    """What is missing once this is asked for."""
    yield from group_by_tokens(units, missing(range(len(units))), tokens)


def _without_adapter(lm: LanguageModel) -> AbstractContextManager[None]:
    """The model without its adapter, if it has one."""
    switch: Callable[[], AbstractContextManager[None]] | None = getattr(lm.model, "disable_adapter", None)
    return switch() if switch is not None else nullcontext()


def _serialise(values: Tensor) -> bytes:
    from safetensors.torch import save

    return save({_NAME: values}, {"sha256": format.tensor_digest(values)})


def _load_cached(file: Path, shape: list[int]) -> Tensor | None:
    """What the file holds; None where there is none, or not a byte is as it was written."""
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as opened:
            found: Tensor = opened.get_tensor(_NAME)
            expected = (opened.metadata() or {}).get("sha256")
        if list(found.shape) == shape and format.tensor_digest(found) == expected:
            return found
    except (SafetensorError, OSError):
        pass
    log.warning("  %s is damaged: the reference is read again", file)
    return None


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the model's weights in their order, without those of an adapter."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        if "lora_" not in name:
            found.update(f"{weight.dtype}{list(weight.shape)}".encode())
            found.update(byte_view(weight.detach().cpu().contiguous()))
    return found.hexdigest()


def initial_losses(lm: LanguageModel, units: Sequence[Unit], folder: Path, tokens: int, *, padded: bool) -> np.ndarray:
    """float32 [N]: nats a supervised token of each unit, of a pair's chosen sequence.

    They are what a preference objective's reference says as well, and computed once for both.

    Args:
        lm: a language model as the training finds it.
        folder: where they are kept.
        tokens: how many are read at once.
        padded: whether the model must be given padded rows.
    """
    sums = reference_log_probs(lm, units, folder, tokens, padded=padded)[:, 0].numpy()
    return -sums / np.array([count_supervised(unit[0]) for unit in units], np.float32)
