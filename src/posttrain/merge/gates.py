"""Gates of a mixture of experts: random, zero, or from what the base makes of each expert's prompts."""

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

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
        vectors = _PromptVectors(self.folder, self._kind, len(self._names))
        rows = [vectors.gates(expert) for expert in self._prompts]
        for number, row in enumerate(rows, 1):
            if not row.any():
                log.warning("the gate of expert %d is zero: its positive and negative prompts are the same", number)
        return {name: torch.stack([row[layer] for row in rows]) for layer, name in enumerate(self._names)}


class _PromptVectors:
    """The base, run on prompts.

    Raises:
        UserError: it cannot be loaded.
    """

    def __init__(self, folder: Path, kind: str, layers: int) -> None:
        self._model, self._tokenizer = load_transformers(folder)
        self._kind, self._layers = kind, layers
        self._inputs: list[Tensor] = []
        for block in decoder_layers(self._model) or ():
            block.mlp.register_forward_pre_hook(lambda module, arguments: self._inputs.append(arguments[0]))

    def gates(self, expert: ExpertPrompts) -> Tensor:
        """Returns the gates of one expert, float32 [layers, width], each of length 1 or zero."""
        gates = torch.stack([self._vector(text) for text in expert.positive]).mean(0)
        if expert.negative:
            gates -= torch.stack([self._vector(text) for text in expert.negative]).mean(0)
        return nn.functional.normalize(gates, dim=-1)

    @torch.no_grad()
    def _vector(self, text: str) -> Tensor:
        ids = self._tokenizer(text, return_tensors="pt").input_ids
        longest = getattr(self._model.config, "max_position_embeddings", None) or ids.shape[1]
        if not 0 < ids.shape[1] <= longest:
            what = f"has {ids.shape[1]} tokens, and the base takes 1 to {longest}"
            raise UserError(what, where=f"prompt `{shorten(text)}`", fix="change it")
        self._inputs.clear()
        ids = ids.long().to(self._model.device)
        if self._kind == "hidden":
            self._model(input_ids=ids)
        else:
            self._inputs.extend([self._model.get_input_embeddings()(ids)] * self._layers)
        tokens = torch.cat(self._inputs).float().cpu()
        return nn.functional.normalize(tokens, dim=-1).mean(1)
