"""The shape of the model that is trained: that of the model to start from, unless it is pruned or resized."""

from typing import Any

from posttrain.models.pruning import PrunedSize, check_pruning
from posttrain.models.shape import read_config, resized_config
from posttrain.train.config import PruneConfig, TrainConfig

PRUNE_SECTION = "train.prune"


def trained_config(config: Any, train: TrainConfig) -> Any:
    """Returns the transformers config of the model that is trained, given that of the model to start from.

    Raises:
        UserError: the model cannot have the size that ``train.prune`` or ``train.shape`` asks for.
    """
    if train.shape.is_set:
        return resized_config(config, "train.shape", **train.shape.model_dump())
    return check_pruning(config, pruned_size(train.prune), PRUNE_SECTION) if train.prune.is_set else config


def check_trained_shape(source: str, train: TrainConfig) -> None:
    """Raises a UserError if a model cannot be trained in the shape that the config asks for; its config alone is read.

    Args:
        source: the model, as ``posttrain.models.sources.locate`` names it.
        train: settings of the training.
    """
    if train.changes_shape:
        trained_config(read_config(source), train)


def pruned_size(prune: PruneConfig) -> PrunedSize:
    """Returns what `posttrain.models.pruning` is to keep."""
    return PrunedSize(prune.layers, prune.heads, prune.inner)
