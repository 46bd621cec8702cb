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
from torch import Tensor, nn

from posttrain.models.head import map_logits
from posttrain.models.language_model import DTYPES, LanguageModel, load_language_model
from posttrain.models.packing import Unit, pack, packed_attention, predicting_states_of_layers
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder, remove_tree, sync_file, sync_folder, write_atomically
from posttrain.store.hashing import digest, file_stats
from posttrain.store.progress import progress_bar as progress
from posttrain.train.data.token_set import longest_lengths
from posttrain.train.data.units import count_supervised, group_by_tokens, tokens_digest
from posttrain.train.objectives.distillation import TopTokens, top_tokens
from posttrain.train.out_of_memory import run_in_groups

_FORMAT = 1

_SPEC_FILE = "what.json"

_HEAD_FILE = "head.safetensors"


@dataclass(frozen=True)
class TeacherSpec:
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


class TeacherOutputs:
    """A teacher's view of N units, in memory-mapped files.

    Args:
        folder: where ``compute_teacher_outputs`` has put it.
        units: those that it was asked about.
        wanted: what it was asked.
        device: where the tensors are wanted.
    """

    def __init__(self, folder: Path, units: Sequence[Unit], wanted: TeacherSpec, device: torch.device) -> None:
        self._starts = _token_offsets(units)
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


def compute_teacher_outputs(
    source: Path, units: Sequence[Unit], wanted: TeacherSpec, task: TaskConfig, tokens: int, folder: Path
) -> Path:
    """Have a teacher read all units, unless it has.

    Args:
        source: folder of the teacher, in Hugging Face layout.
        task: what the student is asked to do.
        tokens: how many are in memory at once.
        folder: gets a folder of the answers, whose path is returned.

    Raises:
        UserError: there is no such model.
    """
    key = digest([_FORMAT, file_stats(source), tokens_digest(units), asdict(wanted)])
    kept = folder / f"teacher-{key[:16]}"
    if not (kept / _SPEC_FILE).exists():
        unfinished = folder / f"{kept.name}.part"
        remove_tree(unfinished)
        make_folder(unfinished)
        _run_teacher(load_language_model(source, task, wanted.dtype), units, wanted, tokens, unfinished)
        for file in unfinished.iterdir():
            sync_file(file)
        write_atomically(unfinished / _SPEC_FILE, json.dumps(asdict(wanted)).encode())
        unfinished.replace(kept)
        sync_folder(folder)
    return kept


@torch.no_grad()
def _run_teacher(lm: LanguageModel, units: Sequence[Unit], wanted: TeacherSpec, tokens: int, folder: Path) -> None:
    if wanted.logits and wanted.top_k is None:
        save_head(lm, folder)
    starts = _token_offsets(units)
    with (
        packed_attention(lm, int(longest_lengths(units).max())) as packs,
        _output_files(folder, int(starts[-1])) as put,
        progress("reading the teacher", len(units), "examples") as advance,
    ):

        def read(rows: Sequence[int]) -> dict[str, Tensor]:
            packed = pack([units[row] for row in rows], lm.device, padded=not packs)
            last, *layers = predicting_states_of_layers(lm, packed, [-1, *wanted.layers])
            return _select_outputs(lm, last, layers, wanted)

        for rows, answers in run_in_groups(units, group_by_tokens(units, range(len(units)), tokens), read):
            for name, values in answers.items():
                put(name, int(starts[rows[0]]), values)
            advance(len(rows))


def _select_outputs(lm: LanguageModel, last: Tensor, layers: list[Tensor], wanted: TeacherSpec) -> dict[str, Tensor]:
    """What is kept of the states of some tokens, by the name of its file."""
    found: dict[str, Tensor] = {}
    if wanted.layers:
        found["layers"] = torch.stack(layers, 1)
    if wanted.logits and wanted.top_k is None:
        found["last"] = last
    elif wanted.logits:
        k, temperature = wanted.top_k or 0, wanted.temperature
        best = map_logits(lm, last, lambda logits, _: top_tokens(logits[:, : wanted.vocabulary], k, temperature))
        found["ids"] = torch.cat([one.ids for one in best]).int()
        found["log_probabilities"] = torch.cat([one.log_probabilities for one in best])
    return found


@contextmanager
def _output_files(folder: Path, rows: int) -> Iterator[Any]:
    """A function that puts rows of a tensor into the file of its name, from a place on."""
    opened: dict[str, np.memmap[Any, Any]] = {}

    def put(name: str, start: int, values: Tensor) -> None:
        plain = values.cpu().contiguous()
        array = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()  # numpy has no bfloat16
        if name not in opened:
            shape = (rows, *array.shape[1:])
            opened[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", array.dtype, shape)
        opened[name][start : start + len(array)] = array

    with disk_errors(folder):
        yield put
        for file in opened.values():
            file.flush()


def _token_offsets(units: Sequence[Unit]) -> np.ndarray:
    """int64 [N + 1]: how many supervised tokens stand before each unit."""
    counts = [sum(map(count_supervised, unit)) for unit in units]
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


class _HeadOnlyModel(nn.Module):
    """What `LanguageModel.logits` needs of a model."""

    generation_config = None

    def __init__(self, config: Any, head: nn.Linear) -> None:
        super().__init__()
        self.config, self.head = config, head

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def save_head(lm: LanguageModel, folder: Path) -> None:
    """Write the weights of a model's head.

    Raises:
        UserError: it is no linear layer.
    """
    from safetensors.torch import save_file

    head = lm.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        what = f"a head of type {type(head).__name__} cannot be kept"
        raise UserError(what, where="train.distill.top_k", fix="keep the most probable tokens: 64 say")
    save_file({name: weight.contiguous() for name, weight in head.state_dict().items()}, folder / _HEAD_FILE)


def load_head(folder: Path, teacher: Path, like: LanguageModel) -> LanguageModel:
    """A model that can do nothing but ``logits``.

    Args:
        folder: where ``save_head`` wrote.
        teacher: the whole model's folder.
        like: the student, whose tokenizer it shares.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig

    weights = load_file(folder / _HEAD_FILE, device=str(like.device))
    words, width = weights["weight"].shape
    with torch.device("meta"):
        head = nn.Linear(width, words, bias="bias" in weights)
    head.load_state_dict(weights, assign=True)
    head.requires_grad_(False)
    config = AutoConfig.from_pretrained(teacher, trust_remote_code=False)
    return LanguageModel(_HeadOnlyModel(config, head), like.tokenizer, like.task)
