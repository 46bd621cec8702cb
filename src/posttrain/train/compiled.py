"""A model's layers through ``torch.compile``: what lies between the matrix products becomes a few fused loops."""

import shutil

from posttrain.models.language_model import LanguageModel
from posttrain.models.shape import decoder_layers
from posttrain.store.errors import UserError


def compile_layers(lm: LanguageModel) -> None:
    """Compile each layer when it is first used, for sequences of any length.

    Raises:
        UserError: there is no compiler, or the model has no list of layers.
    """
    if lm.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError("no C++ compiler is installed", where="train.compile", fix="install g++, or set it to false")
    layers = decoder_layers(lm.decoder)
    if layers is None:
        raise UserError(f"{lm.model.config.model_type} has no list of layers to compile", where="train.compile")
    for layer in layers:
        layer.compile(dynamic=True)
