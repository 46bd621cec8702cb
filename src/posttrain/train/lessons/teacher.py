"""What a teacher says of every supervised token: computed once, before the student is trained, and kept in files.

The teacher is in memory only while it computes. Of its distributions either the ``top_k`` most probable tokens are
kept, 8 k bytes a token, or the last hidden state, from which the output head alone gives all of them again: 2 D bytes a
token, and far less than the logits themselves.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.models.head import over_logits
from posttrain.models.language_model import DTYPES, LanguageModel, load
from posttrain.models.packing import Unit, pack
from posttrain.models.reading import packing, read_layers
from posttrain.models.task import TaskConfig
from posttrain.store.files import make_folder, remove_tree, sync_file, sync_folder, write_atomically, writing
from posttrain.store.hashing import digest, file_states
from posttrain.store.progress import task as progress
from posttrain.train.lessons.digests import tokens_digest
from posttrain.train.lessons.in_groups import in_groups
from posttrain.train.lessons.teacher_head import save_head
from posttrain.train.lessons.units import grouped, supervised_tokens
from posttrain.train.objectives.distillation import TopTokens, top_tokens
from posttrain.train.tokens.token_set import longest

_FORMAT = 1
_WHAT = "what.json"


@dataclass(frozen=True)
class Wanted:
    """What is kept of a teacher.

    Args:
        logits: whether its distributions are wanted.
        top_k: how many tokens of each; None for all.
        temperature: divides the logits that the ``top_k`` are taken from.
        vocabulary: the student's: what the teacher's head has beyond it is no token.
        layers: whose hidden states are wanted.
        dtype: that it computes in.
    """

    logits: bool
    top_k: int | None
    temperature: float
    vocabulary: int
    layers: list[int]
    dtype: str


class Teaching:
    """A teacher's view of N units, in memory-mapped files.

    Args:
        folder: where ``ask`` has put it.
        units: those that it was asked about.
        wanted: what it was asked.
        device: where the tensors are wanted.
    """

    def __init__(self, folder: Path, units: Sequence[Unit], wanted: Wanted, device: torch.device) -> None:
        self._starts = _starts(units)
        self._device, self._dtype = device, DTYPES[wanted.dtype]
        self._kept = {file.stem: np.load(file, mmap_mode="r") for file in folder.glob("*.npy")}

    def top(self, rows: Sequence[int]) -> TopTokens:
        """The most probable tokens at the S supervised tokens of some units."""
        return TopTokens(self._of("ids", rows).long(), self._of("log_probabilities", rows))

    def last(self, rows: Sequence[int]) -> Tensor:
        """[S, D], last hidden states."""
        return self._of("last", rows).view(self._dtype)

    def layers(self, rows: Sequence[int]) -> Tensor:
        """[S, L, D], hidden states of the wanted layers."""
        return self._of("layers", rows).view(self._dtype)

    def _of(self, name: str, rows: Sequence[int]) -> Tensor:
        parts = [self._kept[name][self._starts[row] : self._starts[row + 1]] for row in rows]
        return torch.from_numpy(np.concatenate(parts)).to(self._device)


def ask(source: Path, units: Sequence[Unit], wanted: Wanted, task: TaskConfig, tokens: int, folder: Path) -> Path:
    """Have a teacher read all units, unless it has.

    Args:
        source: folder of the teacher, in Hugging Face layout.
        task: what the student is asked to do.
        tokens: how many are in memory at once.
        folder: gets a folder of the answers, whose path is returned.

    Raises:
        UserError: there is no such model.
    """
    key = digest([_FORMAT, file_states(source), tokens_digest(units), asdict(wanted)])
    kept = folder / f"teacher-{key[:16]}"
    if not (kept / _WHAT).exists():
        unfinished = folder / f"{kept.name}.part"
        remove_tree(unfinished)
        make_folder(unfinished)
        _read_all(load(source, task, wanted.dtype), units, wanted, tokens, unfinished)
        for file in unfinished.iterdir():
            sync_file(file)
        write_atomically(unfinished / _WHAT, json.dumps(asdict(wanted)).encode())
        unfinished.replace(kept)
        sync_folder(folder)
    return kept


@torch.no_grad()
def _read_all(lm: LanguageModel, units: Sequence[Unit], wanted: Wanted, tokens: int, folder: Path) -> None:
    if wanted.logits and wanted.top_k is None:
        save_head(lm, folder)
    starts = _starts(units)
    with (
        packing(lm, int(longest(units).max())) as packs,
        _files(folder, int(starts[-1])) as put,
        progress("reading the teacher", len(units), "examples") as advance,
    ):

        def read(rows: Sequence[int]) -> dict[str, Tensor]:
            packed = pack([units[row] for row in rows], lm.device, padded=not packs)
            last, *layers = read_layers(lm, packed, [-1, *wanted.layers])
            return _answers(lm, last, layers, wanted)

        for rows, answers in in_groups(units, grouped(units, range(len(units)), tokens), read):
            for name, values in answers.items():
                put(name, int(starts[rows[0]]), values)
            advance(len(rows))


def _answers(lm: LanguageModel, last: Tensor, layers: list[Tensor], wanted: Wanted) -> dict[str, Tensor]:
    """What is kept of the states of some tokens, by the name of its file."""
    found: dict[str, Tensor] = {}
    if wanted.layers:
        found["layers"] = torch.stack(layers, 1)
    if wanted.logits and wanted.top_k is None:
        found["last"] = last
    elif wanted.logits:
        k, temperature = wanted.top_k or 0, wanted.temperature
        best = over_logits(lm, last, lambda logits, _: top_tokens(logits[:, : wanted.vocabulary], k, temperature))
        found["ids"] = torch.cat([one.ids for one in best]).int()
        found["log_probabilities"] = torch.cat([one.log_probabilities for one in best])
    return found


@contextmanager
def _files(folder: Path, rows: int) -> Iterator[Any]:
    """A function that puts rows of a tensor into the file of its name, from a place on."""
    opened: dict[str, np.memmap[Any, Any]] = {}

    def put(name: str, start: int, values: Tensor) -> None:
        plain = values.cpu().contiguous()
        array = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()  # numpy has no bfloat16
        if name not in opened:
            shape = (rows, *array.shape[1:])
            opened[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", array.dtype, shape)
        opened[name][start : start + len(array)] = array

    with writing(folder):
        yield put
        for file in opened.values():
            file.flush()


def _starts(units: Sequence[Unit]) -> np.ndarray:
    """int64 [N + 1]: how many supervised tokens stand before each unit."""
    counts = [sum(map(supervised_tokens, unit)) for unit in units]
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
