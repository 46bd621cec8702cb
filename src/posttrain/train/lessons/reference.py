"""What a reference says of all units: computed once, before the weights move, and kept in a file."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Unit, pack
from posttrain.store.files import write_atomically
from posttrain.store.hashing import digest
from posttrain.store.progress import task
from posttrain.train.checkpoint import tensor_bytes
from posttrain.train.lessons.base import evaluating
from posttrain.train.lessons.digests import tokens_digest, weights_digest
from posttrain.train.lessons.in_groups import in_groups
from posttrain.train.lessons.log_probabilities import sequences
from posttrain.train.lessons.units import grouped

log = logging.getLogger("posttrain")

_FORMAT, _NAME = 1, "log_probabilities"


def reference(
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
    kept = _kept(file, [len(units), len(units[0])])
    if kept is None:
        kept = _computed(lm, units, tokens, padded, parts)
        write_atomically(file, _content(kept))
    return kept


@torch.no_grad()
def _computed(
    lm: LanguageModel, units: Sequence[Unit], tokens: int, padded: bool, parts: Iterable[Sequence[int]]
) -> Tensor:
    found = torch.full((len(units), len(units[0])), torch.nan)

    def missing(rows: Sequence[int]) -> list[int]:
        return [row for row in rows if found[row, 0].isnan()]

    def read(rows: Sequence[int]) -> Tensor:
        packed = pack([units[row] for row in rows], lm.device, padded=padded)
        return sequences(lm, packed).sums.cpu().view(len(rows), -1)

    wanted = (rows for rows in chain(parts, _rest(units, tokens, missing)) if missing(rows))
    with evaluating(lm.model), _bare(lm), task("reading the reference", len(units), "examples") as advance:
        for rows, sums in in_groups(units, wanted, read):
            fresh = set(missing(rows))
            for row, its in zip(rows, sums, strict=True):
                if row in fresh:
                    found[row] = its
            advance(len(fresh))
    return found


def _rest(units: Sequence[Unit], tokens: int, missing: Callable[[Sequence[int]], list[int]]) -> Iterator[Sequence[int]]:
    """What is missing once this is asked for."""
    yield from grouped(units, missing(range(len(units))), tokens)


def _bare(lm: LanguageModel) -> AbstractContextManager[None]:
    """The model without its adapter, if it has one."""
    switch: Callable[[], AbstractContextManager[None]] | None = getattr(lm.model, "disable_adapter", None)
    return switch() if switch is not None else nullcontext()


def _content(values: Tensor) -> bytes:
    from safetensors.torch import save

    return save({_NAME: values}, {"sha256": tensor_bytes.digest(values)})


def _kept(file: Path, shape: list[int]) -> Tensor | None:
    """What the file holds; None where there is none, or not a byte is as it was written."""
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as opened:
            found: Tensor = opened.get_tensor(_NAME)
            expected = (opened.metadata() or {}).get("sha256")
        if list(found.shape) == shape and tensor_bytes.digest(found) == expected:
            return found
    except (SafetensorError, OSError):
        pass
    log.warning("  %s is damaged: the reference is read again", file)
    return None
