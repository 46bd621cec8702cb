"""A teacher's outputs at every supervised token: computed once, before the student is trained, and cached in files.

The teacher is in memory only while it computes. Of its distributions either the ``top_k`` most probable tokens are
kept, 8 k bytes per token, or the last hidden state, from which the output head alone gives all of them again: 2 D bytes
per token, and far less than the logits themselves.
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

from posttrain.models.head import map_logits, predicting_states_of_layers
from posttrain.models.language_model import DTYPES, LanguageModel, load_language_model
from posttrain.models.packing import Unit, pack, packed_attention
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder, remove_tree, sync_file, sync_folder, write_atomically
from posttrain.store.hashing import digest, file_stats
from posttrain.store.progress import progress_bar as progress
from posttrain.train.data.token_set import count_supervised, longest_lengths
from posttrain.train.data.units import group_by_tokens, tokens_digest
from posttrain.train.objectives.loss import to_float32
from posttrain.train.out_of_memory import run_in_groups

_FORMAT = 1

_SPEC_FILE = "what.json"

_HEAD_FILE = "head.safetensors"


@dataclass(frozen=True, eq=False)
class TopTokens:
    """A teacher's k most probable next tokens at N positions.

    Args:
        ids: int64 [N, k].
        log_probabilities: float32 [N, k] under the whole vocabulary, at the objective's temperature, nats.
    """

    ids: Tensor
    log_probabilities: Tensor

    def __getitem__(self, rows: slice) -> "TopTokens":
        return TopTokens(self.ids[rows], self.log_probabilities[rows])


def top_tokens(logits: Tensor, k: int, temperature: float = 1.0) -> TopTokens:
    """The teacher's k most probable tokens from its logits [N, V], most probable first."""
    # Normalised before the cut: what is missing from 1 is the probability of all other tokens.
    best = (to_float32(logits.detach()) / temperature).log_softmax(-1).topk(min(k, logits.shape[-1]), dim=-1)
    return TopTokens(best.indices, best.values)


@dataclass(frozen=True)
class TeacherSpec:
    """Names the outputs of a teacher that are kept.

    Args:
        logits: whether its distributions are kept.
        top_k: how many tokens of each; None for all.
        temperature: divides the logits that the ``top_k`` are taken from.
        vocabulary: the student's: what the teacher's head has beyond it is not a token.
        layers: layers whose hidden states are kept.
        dtype: dtype that it computes in.
    """

    logits: bool
    top_k: int | None
    temperature: float
    vocabulary: int
    layers: list[int]
    dtype: str


class TeacherOutputs:
    """Reads a teacher's outputs for N units from memory-mapped files.

    Args:
        folder: as ``compute_teacher_outputs`` returned it.
        units: the units that it read.
        spec: the outputs that were kept.
        device: the tensors' device.
    """

    def __init__(self, folder: Path, units: Sequence[Unit], spec: TeacherSpec, device: torch.device) -> None:
        self._starts = _token_offsets(units)
        self._device, self._dtype = device, DTYPES[spec.dtype]
        self._arrays = {file.stem: np.load(file, mmap_mode="r") for file in folder.glob("*.npy")}

    def top(self, rows: Sequence[int]) -> TopTokens:
        """The most probable tokens at the S supervised tokens of some units."""
        return TopTokens(self._of("ids", rows).long(), self._of("log_probabilities", rows))

    def last(self, rows: Sequence[int]) -> Tensor:
        """[S, D], last hidden states."""
        # bfloat16 lies in the file as int16: the same bits, read as what they are.
        return self._of("last", rows).view(self._dtype)

    def layers(self, rows: Sequence[int]) -> Tensor:
        """[S, L, D], hidden states of the layers in the spec."""
        return self._of("layers", rows).view(self._dtype)

    def _of(self, name: str, rows: Sequence[int]) -> Tensor:
        parts = [self._arrays[name][self._starts[row] : self._starts[row + 1]] for row in rows]
        return torch.from_numpy(np.concatenate(parts)).to(self._device)


def compute_teacher_outputs(
    source: Path, units: Sequence[Unit], spec: TeacherSpec, task: TaskConfig, tokens: int, folder: Path
) -> Path:
    """Runs a teacher over all units, unless its outputs are cached.

    Args:
        source: folder of the teacher, in Hugging Face layout.
        task: the student's.
        tokens: how many are in memory at once.
        folder: gets a folder of outputs, whose path is returned.

    Raises:
        UserError: there is no such model.
    """
    # All that the outputs depend on: another teacher, spec or set of tokens has a folder of its own.
    key = digest([_FORMAT, file_stats(source), tokens_digest(units), asdict(spec)])
    outputs = folder / f"teacher-{key[:16]}"
    if not (outputs / _SPEC_FILE).exists():
        unfinished = folder / f"{outputs.name}.part"
        # A kill may have left a part of it.
        remove_tree(unfinished)
        make_folder(unfinished)
        _run_teacher(load_language_model(source, task, spec.dtype), units, spec, tokens, unfinished)
        for file in unfinished.iterdir():
            sync_file(file)
        # The spec is written last and marks the folder as whole: a kill before leaves a folder that is not used.
        write_atomically(unfinished / _SPEC_FILE, json.dumps(asdict(spec)).encode())
        unfinished.replace(outputs)
        sync_folder(folder)
    return outputs


# The head and the layers come from one pass: a teacher is often many times as large as its student.
@torch.no_grad()
def _run_teacher(lm: LanguageModel, units: Sequence[Unit], spec: TeacherSpec, tokens: int, folder: Path) -> None:
    if spec.logits and spec.top_k is None:
        # The head alone: training does not load the whole teacher again.
        save_head(lm, folder)
    starts = _token_offsets(units)
    with (
        packed_attention(lm, int(longest_lengths(units).max())) as packs,
        _output_files(folder, int(starts[-1])) as put,
        progress("reading the teacher", len(units), "examples") as advance,
    ):

        def read(rows: Sequence[int]) -> dict[str, Tensor]:
            packed = pack([units[row] for row in rows], lm.device, padded=not packs)
            last, *layers = predicting_states_of_layers(lm, packed, [-1, *spec.layers])
            return _select_outputs(lm, last, layers, spec)

        for rows, outputs in run_in_groups(units, group_by_tokens(units, range(len(units)), tokens), read):
            for name, values in outputs.items():
                # Groups are consecutive rows, so that each fills one slice of the files.
                put(name, int(starts[rows[0]]), values)
            advance(len(rows))


def _select_outputs(lm: LanguageModel, last: Tensor, layers: list[Tensor], spec: TeacherSpec) -> dict[str, Tensor]:
    """Selects the outputs of some tokens to keep, by file name."""
    outputs: dict[str, Tensor] = {}
    if spec.layers:
        outputs["layers"] = torch.stack(layers, 1)
    if spec.logits and spec.top_k is None:
        outputs["last"] = last
    elif spec.logits:
        k, temperature = spec.top_k or 0, spec.temperature
        best = map_logits(lm, last, lambda logits, _: top_tokens(logits[:, : spec.vocabulary], k, temperature))
        # int32 halves the file, and holds every vocabulary.
        outputs["ids"] = torch.cat([top.ids for top in best]).int()
        outputs["log_probabilities"] = torch.cat([top.log_probabilities for top in best])
    return outputs


@contextmanager
def _output_files(folder: Path, rows: int) -> Iterator[Any]:
    """Yields a function that writes rows of a tensor into the file of its name, from a row on."""
    opened: dict[str, np.memmap[Any, Any]] = {}

    def put(name: str, start: int, values: Tensor) -> None:
        plain = values.cpu().contiguous()
        array = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()  # numpy has no bfloat16
        if name not in opened:
            shape = (rows, *array.shape[1:])
            # Mapped, not collected in memory: the outputs of a training set may be larger than it.
            opened[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", array.dtype, shape)
        opened[name][start : start + len(array)] = array

    with disk_errors(folder):
        yield put
        for file in opened.values():
            file.flush()


def _token_offsets(units: Sequence[Unit]) -> np.ndarray:
    """int64 [N + 1]: number of supervised tokens before each unit."""
    counts = [sum(map(count_supervised, unit)) for unit in units]
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


class _HeadOnlyModel(nn.Module):
    """The parts of a model that `LanguageModel.logits` uses."""

    generation_config = None
    # `LanguageModel` looks for a decoder when it is made; this model has none, and only its logits are computed.
    base_model = None

    def __init__(self, config: Any, head: nn.Linear) -> None:
        super().__init__()
        self.config, self.head = config, head

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def save_head(lm: LanguageModel, folder: Path) -> None:
    """Writes the weights of a model's head.

    Raises:
        UserError: it is not a linear layer.
    """
    from safetensors.torch import save_file

    head = lm.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        what = f"a head of type {type(head).__name__} cannot be kept"
        raise UserError(what, where="train.objective.top_k", fix="keep the most probable tokens: 64 say")
    save_file({name: weight.contiguous() for name, weight in head.state_dict().items()}, folder / _HEAD_FILE)


def load_head(folder: Path, teacher: Path, like: LanguageModel) -> LanguageModel:
    """Loads a head as a model that only computes ``logits``.

    Args:
        folder: written by ``save_head``.
        teacher: the whole model's folder.
        like: the student, whose tokenizer it shares.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig

    weights = load_file(folder / _HEAD_FILE, device=str(like.device))
    vocabulary, width = weights["weight"].shape
    with torch.device("meta"):  # no memory for weights that are assigned below
        head = nn.Linear(width, vocabulary, bias="bias" in weights)
    head.load_state_dict(weights, assign=True)
    # Without gradients: they would take as much memory as the head.
    head.requires_grad_(False)
    config = AutoConfig.from_pretrained(teacher, trust_remote_code=False)
    return LanguageModel(_HeadOnlyModel(config, head), like.tokenizer, like.task)
