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
from posttrain.train.data.token_set import count_supervised
from posttrain.train.data.units import group_by_tokens, tokens_digest
from posttrain.train.objectives.base import evaluation_mode
from posttrain.train.objectives.loss import sequence_log_probs
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
    groups: Iterable[Sequence[int]] = (),
) -> Tensor:
    """Computes the log-probabilities of the units' sequences under the initial weights, or loads them from the cache.

    The cache is a file named by the digest of weights and tokens.

    Args:
        units: N of K sequences each.
        folder: folder of the file.
        tokens: tokens in memory at once.
        padded: whether the model needs padded rows.
        groups: the rows of micro-batches that are read first, as they are. Other units follow.

    Returns:
        float32 [N, K], nats.
    """
    # Part of the key: log-probabilities are rounded as the policy's are, or the first step's ratios are not 0.
    precision = str(torch.get_autocast_dtype(lm.device.type)) if torch.is_autocast_enabled(lm.device.type) else "own"
    key = digest([_FORMAT, weights_digest(lm.model), tokens_digest(units), precision])
    file = folder / f"reference-{key[:16]}.safetensors"
    log_probs = _load_cached(file, [len(units), len(units[0])])
    if log_probs is None:
        log_probs = _compute(lm, units, tokens, padded, groups)
        write_atomically(file, _serialise(log_probs))
    return log_probs


@torch.no_grad()
def _compute(
    lm: LanguageModel, units: Sequence[Unit], tokens: int, padded: bool, groups: Iterable[Sequence[int]]
) -> Tensor:
    # NaN marks a row that is still to be read.
    log_probs = torch.full((len(units), len(units[0])), torch.nan)

    def missing(rows: Sequence[int]) -> list[int]:
        return [row for row in rows if log_probs[row, 0].isnan()]

    def read(rows: Sequence[int]) -> Tensor:
        packed = pack([units[row] for row in rows], lm.device, padded=padded)
        return sequence_log_probs(lm, packed).sums.cpu().view(len(rows), -1)

    # Training's own micro-batches come first: in bfloat16 an answer's log-probability depends on its neighbours in the
    # row by tenths of a nat, so the policy's first step rounds like the reference only in the same company.
    pending = (rows for rows in chain(groups, _remaining_groups(units, tokens, missing)) if missing(rows))
    with (
        evaluation_mode(lm.model),
        _without_adapter(lm),
        progress_bar("reading the reference", len(units), "examples") as advance,
    ):
        for rows, sums in run_in_groups(units, pending, read):
            new = set(missing(rows))
            for row, row_sums in zip(rows, sums, strict=True):
                if row in new:
                    log_probs[row] = row_sums
            advance(len(new))
    return log_probs


def _remaining_groups(
    units: Sequence[Unit], tokens: int, missing: Callable[[Sequence[int]], list[int]]
) -> Iterator[Sequence[int]]:
    """Groups the rows that are missing when the first group is requested, and not before."""
    yield from group_by_tokens(units, missing(range(len(units))), tokens)


def _without_adapter(lm: LanguageModel) -> AbstractContextManager[None]:
    """Disables the model's adapter, if it has one."""
    switch: Callable[[], AbstractContextManager[None]] | None = getattr(lm.model, "disable_adapter", None)
    return switch() if switch is not None else nullcontext()


def _serialise(values: Tensor) -> bytes:
    from safetensors.torch import save

    return save({_NAME: values}, {"sha256": format.tensor_digest(values)})


def _load_cached(file: Path, shape: list[int]) -> Tensor | None:
    """Loads the file; None if there is none, or its content differs from its checksum."""
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as opened:
            values: Tensor = opened.get_tensor(_NAME)
            expected = (opened.metadata() or {}).get("sha256")
        # A wrong reference would change the training silently, and computing it again is cheap beside that.
        if list(values.shape) == shape and format.tensor_digest(values) == expected:
            return values
    except (SafetensorError, OSError):
        pass
    log.warning("  %s is damaged: it is computed again", file)
    return None


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the model's weights in their order, without those of an adapter."""
    sha256 = hashlib.sha256()
    for name, weight in model.named_parameters():
        # The reference is the model below the adapter; that one differs when a training resumes.
        if "lora_" not in name:
            # Dtype and shape too: equal bytes may be other weights.
            sha256.update(f"{weight.dtype}{list(weight.shape)}".encode())
            # The weights themselves, not their files, which may hold the same model in another form.
            sha256.update(byte_view(weight.detach().cpu().contiguous()))
    return sha256.hexdigest()


def initial_losses(lm: LanguageModel, units: Sequence[Unit], folder: Path, tokens: int, *, padded: bool) -> np.ndarray:
    """float32 [N]: nats a supervised token of each unit before training, of a pair's chosen sequence.

    Preference objectives use the same cached reference.

    Args:
        lm: the model before training.
        folder: folder of the cache.
        tokens: tokens in memory at once.
        padded: whether the model needs padded rows.
    """
    sums = reference_log_probs(lm, units, folder, tokens, padded=padded)[:, 0].numpy()
    return -sums / np.array([count_supervised(unit[0]) for unit in units], np.float32)
