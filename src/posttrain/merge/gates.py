"""Gates of a mixture of experts: random, zero, or from what the base makes of each expert's prompts."""

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.merge.sources import EMBEDDING, WeightSource
from posttrain.models.language_model import load_transformers
from posttrain.models.loading import load_tokenizer
from posttrain.models.shape import decoder_layers
from posttrain.store.errors import UserError, shorten

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class ExpertPrompts:
    """Texts that an expert is for, and texts that it is not for."""

    positive: Sequence[str]
    negative: Sequence[str] = ()


class GateSource(WeightSource):
    """The gates of all layers, float32 [experts, width] each, and other small tensors that no model has.

    They are computed on the first read, as a dry run needs only their shapes.

    Args:
        kind: option ``gate`` of `mixture_of_experts`, which defines each kind.
        base: the model whose hidden states or embeddings they are made of.
        names: name of each layer's gate, in the order of the layers.
        prompts: one an expert.
        width: of the hidden states.
        dtype: that they are rounded to.
        seed: of random gates.
        zeros: shape of each tensor of zeros.
    """

    def __init__(
        self,
        kind: str,
        base: WeightSource,
        names: Sequence[str],
        prompts: Sequence[ExpertPrompts],
        width: int,
        dtype: torch.dtype,
        seed: int,
        zeros: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.name = self.location = f"gates ({kind})"
        self.folder, self.tokenizer_folder, self.config = base.folder, base.tokenizer_folder, base.config
        self._kind, self._names, self._prompts, self._dtype, self._seed = kind, list(names), prompts, dtype, seed
        self._base = base
        self._shapes = dict.fromkeys(names, (len(prompts), width)) | dict(zeros)
        self._gates: dict[str, Tensor] = {}
        self._lock = Lock()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtype(self, tensor: str) -> torch.dtype:
        return self._dtype

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        self.prepare()
        if tensor in self._gates:
            out.copy_(self._gates[tensor].reshape(-1)[start : start + len(out)])
        else:
            out.zero_()

    def prepare(self) -> None:
        """Computes the gates; with hidden states, this loads the base and runs it on the prompts.

        Raises:
            UserError: the base cannot be loaded, or a prompt has no tokens or more than the base takes.
        """
        with self._lock:
            if self._gates or self._kind == "zero":
                return
            gates = self._random() if self._kind == "random" else self._from_prompts()
            self._gates = {name: gate.to(self._dtype) for name, gate in gates.items()}

    def _random(self) -> dict[str, Tensor]:
        std = float(self.config.get("initializer_range") or 0.02)
        gates = {}
        for name in self._names:
            generator = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
            gates[name] = torch.from_numpy(generator.normal(0.0, std, self._shapes[name])).float()
        return gates

    def _from_prompts(self) -> dict[str, Tensor]:
        vector = _HiddenStates(self.folder).vectors if self._kind == "hidden" else _Embeddings(self._base).vectors
        rows = [_gates(expert, vector) for expert in self._prompts]
        for number, row in enumerate(rows, 1):
            if not row.any():
                log.warning("the gate of expert %d is zero: its positive and negative prompts are the same", number)
        # Embeddings are one vector for all layers.
        rows = [row.expand(len(self._names), -1) for row in rows]
        return {name: torch.stack([row[layer] for row in rows]) for layer, name in enumerate(self._names)}


def _gates(expert: ExpertPrompts, vectors: Callable[[str], Tensor]) -> Tensor:
    """Returns the gates of one expert, float32 [layers, width], each of length 1 or zero."""
    gates = torch.stack([vectors(text) for text in expert.positive]).mean(0)
    if expert.negative:
        gates -= torch.stack([vectors(text) for text in expert.negative]).mean(0)
    return nn.functional.normalize(gates, dim=-1)


def _mean_directions(tokens: Tensor) -> Tensor:
    """Returns the mean of the tokens' directions, float32 [layers, width], of [layers, tokens, width]."""
    return nn.functional.normalize(tokens.float(), dim=-1).mean(1)


def _token_ids(tokenizer: Any, text: str, longest: int | None) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids.long()
    if not 0 < ids.shape[1] <= (longest or ids.shape[1]):
        what = f"has {ids.shape[1]} tokens, and the base takes 1 to {longest}"
        raise UserError(what, where=f"prompt `{shorten(text)}`", fix="change it")
    return ids


class _HiddenStates:
    """The base, run on prompts in its stored dtype.

    Raises:
        UserError: it cannot be loaded.
    """

    def __init__(self, folder: Path) -> None:
        self._model, self._tokenizer = load_transformers(folder)
        self._inputs: list[Tensor] = []
        blocks: Any = decoder_layers(self._model)
        for block in blocks:
            block.mlp.register_forward_pre_hook(lambda module, arguments: self._inputs.append(arguments[0]))

    @torch.no_grad()
    def vectors(self, text: str) -> Tensor:
        """Returns the mean direction of what each layer's MLP reads, float32 [layers, width]."""
        ids = _token_ids(self._tokenizer, text, getattr(self._model.config, "max_position_embeddings", None))
        self._inputs.clear()
        self._model(input_ids=ids.to(self._model.device))
        return _mean_directions(torch.cat(self._inputs).cpu())


class _Embeddings:
    """Rows of the base's embedding."""

    def __init__(self, base: WeightSource) -> None:
        self._base, self._tokenizer = base, load_tokenizer(str(base.tokenizer_folder))

    def vectors(self, text: str) -> Tensor:
        """Returns the mean direction of the tokens' embeddings, float32 [1, width]."""
        ids = _token_ids(self._tokenizer, text, self._base.config.get("max_position_embeddings"))[0].tolist()
        width = self._base.shapes()[EMBEDDING][1]
        rows = torch.empty(len(ids), width, dtype=self._base.dtype(EMBEDDING))
        for row, token in zip(rows, ids, strict=True):
            self._base.read(EMBEDDING, token * width, row)
        return _mean_directions(rows[None])
