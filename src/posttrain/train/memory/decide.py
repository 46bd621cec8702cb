"""What ``train.micro_batch_tokens: auto`` is for one training, decided once."""

import logging
from pathlib import Path

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder
from posttrain.train.config import TrainConfig
from posttrain.train.memory.available import available_bytes, process_bytes
from posttrain.train.memory.budget import choose_budget
from posttrain.train.memory.static import parameter_bytes
from posttrain.train.memory.weights import Blueprint
from posttrain.train.notes import read_notes

log = logging.getLogger("posttrain")

_UNKNOWN = 4096
"""Tokens, for a model that the estimate knows nothing of."""


def decided(config: TrainConfig, lm: LanguageModel, longest: int, scratch: Path) -> TrainConfig:
    """The config with ``micro_batch_tokens`` as a number: what was decided before, or what fits here.

    Args:
        lm: the model as it is trained, its adapter on it.
        longest: tokens of the longest sequence.
        scratch: of the training; keeps what was decided, so that a resumed training goes on in the same micro-batches.
    """
    if config.micro_batch_tokens != "auto":
        return config
    notes = read_notes(scratch)
    if notes.auto_budget is None:
        make_folder(scratch)
        notes.auto_budget = _budget(config, lm, longest)
        notes.write(scratch)
    return config.model_copy(update={"micro_batch_tokens": notes.auto_budget})


def _budget(config: TrainConfig, lm: LanguageModel, longest: int) -> int:
    device = lm.device.type
    try:
        blueprint = Blueprint.of_model(lm.model)
    except UserError:
        log.info("  nothing is known of this model's memory: micro-batches of %d tokens", _UNKNOWN)
        return _UNKNOWN
    # The weights are in memory already, and part of the estimate.
    process = max(0, process_bytes() - parameter_bytes(blueprint, config))
    found = choose_budget(blueprint, config, available_bytes(device), longest, device=device, process=process)
    if not found.fits:
        log.warning("  the estimate is that memory may run out: posttrain plan says of what")
    return found.tokens
