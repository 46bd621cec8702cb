"""Gates of a mixture of experts: random, or from the base's hidden states on each expert's prompts."""

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

from posttrain.merge.sources import WeightSource
from posttrain.models.language_model import load_transformers
from posttrain.models.shape import decoder_layers
from posttrain.store.errors import UserError, shorten

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class ExpertPrompts:
    """Positive and negative prompts of an expert."""

    positive: Sequence[str]
    negative: Sequence[str] = ()


class GateSource(WeightSource):
    """The gates of all layers, float32 [experts, width] each, and other small tensors that no model has.

    They are computed on the first read, as a dry run needs only their shapes.

    Args:
        kind: option ``gate`` of `mixture_of_experts`, which defines each kind.
        base: the model whose hidden states they are made of.
        names: name of each layer's gate, in the order of the layers.
        prompts: one per expert.
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
        """Computes the gates; those of prompts load the base and run it.

        Raises:
            UserError: the base cannot be loaded, or a prompt has no tokens or more than the base takes.
        """
        with self._lock:
            if self._gates:
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
        vectors = _HiddenStates(self.folder).vectors
        rows = [_gates(expert, vectors) for expert in self._prompts]
        for number, row in enumerate(rows, 1):
            if not row.any():
                log.warning("the gate of expert %d is zero: its positive and negative prompts are the same", number)
        return {name: torch.stack([row[layer] for row in rows]) for layer, name in enumerate(self._names)}


def _gates(expert: ExpertPrompts, vectors: Callable[[str], Tensor]) -> Tensor:
    """Returns the gates of one expert, float32 [layers, width], each of length 1 or zero."""
    gates = torch.stack([vectors(text) for text in expert.positive]).mean(0)
    if expert.negative:
        gates -= torch.stack([vectors(text) for text in expert.negative]).mean(0)
    return nn.functional.normalize(gates, dim=-1)


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
        """Returns the mean direction of what each layer's MLP reads, float32 [layers, width].

        Raises:
            UserError: the prompt has no tokens, or more than the base takes.
        """
        ids: Tensor = self._tokenizer(text, return_tensors="pt").input_ids.long()
        longest = getattr(self._model.config, "max_position_embeddings", None)
        if not 0 < ids.shape[1] <= (longest or ids.shape[1]):
            what = f"has {ids.shape[1]} tokens, and the base takes 1 to {longest}"
            raise UserError(what, where=f"prompt `{shorten(text)}`", fix="change it")
        self._inputs.clear()
        self._model(input_ids=ids.to(self._model.device))
        return nn.functional.normalize(torch.cat(self._inputs).cpu().float(), dim=-1).mean(1)
