"""What is seen of a model in its folder before any of it is loaded."""

import json
from pathlib import Path

from posttrain.store.errors import UserError


def check_folder(folder: Path, *, weights: bool = True) -> None:
    """Raise a UserError unless the folder looks like a Hugging Face causal language model with safe weights.

    Args:
        weights: whether weights must lie there; a config is enough to train from scratch.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise UserError("is no model: it holds no config.json", where=str(folder))
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        raise UserError("is no model: config.json cannot be read", where=str(folder)) from None
    if not kind:
        raise UserError("is no model: config.json names no model_type", where=str(folder))
    if weights and not any(folder.glob("*.safetensors")):
        raise UserError(
            "holds no safetensors weights", where=str(folder), fix="convert it first: pickles are not loaded"
        )


def first_line(error: Exception) -> str:
    """What a library's error says, without what follows."""
    return next(iter(str(error).splitlines()), type(error).__name__)
