"""A decoder that is run layer by layer, with the weights of one layer in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.merge.gram_matrices import untied_head
from posttrain.merge.statistics import TokenSequence, hidden_states
from posttrain.models.language_model import LanguageModel
from posttrain.models.loading import load_config, load_generation_config, load_tokenizer
from posttrain.models.shape import decoder_layers, meta_model
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError


class LayerwiseModel:
    """A causal language model without weights, whose layers are loaded and run one at a time, in float32.

    Each run is a forward pass of the whole decoder, in which all layers but one hand on what they get: the decoder
    computes masks and positions as its family does, for each layer its own. It is exact where a layer reads nothing of
    the layers before it but the hidden states.

    Args:
        folder: config and tokenizer of the model.

    Attributes:
        lm: the model, whose layers are on the ``meta`` device unless they are loaded.
        head: name of the output head's weight; None if it is the embedding's.
        layers: names of the parameters and buffers of each layer.
        outside: those of the decoder outside of its layers.

    Raises:
        UserError: transformers does not know the family, or it has no list of layers.
    """

    def __init__(self, folder: Path) -> None:
        model = meta_model(load_config(str(folder))).float().eval()
        model.generation_config = load_generation_config(str(folder)) or model.generation_config
        self.lm = LanguageModel(model, load_tokenizer(str(folder)), TaskConfig())
        self.head = untied_head(self.lm)
        layers = decoder_layers(self.lm.decoder)
        if layers is None:
            raise UserError(f"models of type {model.config.model_type} have no list of layers", where="method")
        names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        tensors = list(model.state_dict())
        self.layers = [[name for name in tensors if name.startswith(names[layer])] for layer in layers]
        inside = names[layers]
        self.outside = [
            name for name in tensors if name.startswith(names[self.lm.decoder]) and not name.startswith(inside)
        ]
        self._modules = list(layers)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._states: Tensor | None = None
        self._returns_tuple = False
        for layer in self._modules:
            layer.forward = self._hand_on

    def parameters(self, layer: int) -> dict[str, Tensor]:
        """Returns the parameters of a loaded layer, by their names in the model."""
        names = set(self.layers[layer])
        return {name: parameter for name, parameter in self.lm.model.named_parameters() if name in names}

    @torch.no_grad()
    def load(self, layer: int | None, read: Callable[[str], Tensor | None]) -> None:
        """Loads a layer, or what is outside of the layers.

        Args:
            layer: its number; None for what is outside.
            read: returns a parameter or buffer by its name; None to leave it as the model computes it.
        """
        root = self.lm.decoder if layer is None else self._modules[layer]
        inner = {module for part in self._modules for module in part.modules()} if layer is None else set()
        for module in root.modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if module not in inner and any(tensor.is_meta for tensor in tensors):
                self._allocate(module)
        tensors = self.lm.model.state_dict()
        for name in self.outside if layer is None else self.layers[layer]:
            if (value := read(name)) is not None:
                tensors[name].copy_(value)

    def _allocate(self, module: nn.Module) -> None:
        module.to_empty(device=self._device, recurse=False)
        with torch.random.fork_rng(devices=[]):
            # transformers computes buffers that no file holds, such as rotary frequencies, with the initial weights.
            self.lm.model._init_weights(module)

    def unload(self, layer: int) -> None:
        """Frees the memory of a layer."""
        self._modules[layer].to("meta")

    @torch.inference_mode()
    def run(self, sequence: TokenSequence, layer: int, states: Tensor | None) -> Tensor:
        """Runs one layer.

        Args:
            sequence: the tokens.
            layer: its number; it is loaded.
            states: its inputs, float32 [1, S, D]; None for the first layer, which reads the embeddings.

        Returns:
            Its outputs, float32 [1, S, D].
        """
        module, outputs = self._modules[layer], []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._returns_tuple = isinstance(output, tuple)
            outputs.append(output[0] if self._returns_tuple else output)

        del module.forward  # its class's is the layer's own
        hook = module.register_forward_hook(keep)
        try:
            self.last_states(sequence, states)
        finally:
            hook.remove()
            module.forward = self._hand_on
        result: Tensor = outputs[0]
        return result

    @torch.inference_mode()
    def last_states(self, sequence: TokenSequence, states: Tensor | None) -> Tensor:
        """Returns what the output head reads, [S, D], of the last layer's outputs [1, S, D]."""
        self._states = states
        try:
            return hidden_states(self.lm, sequence, self._device)
        finally:
            self._states = None

    def _hand_on(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Stands for the ``forward`` of each layer that is not run."""
        states = hidden_states if self._states is None else self._states
        self._states = None  # for the first layer alone
        return (states,) if self._returns_tuple else states
