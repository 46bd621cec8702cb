"""All that changes the model's forward pass while it trains."""

from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.models.language_model import LanguageModel
from posttrain.train.noise.config import NoiseConfig
from posttrain.train.noise.dropout import dropout
from posttrain.train.noise.neftune import neftune


@contextmanager
def noise(lm: LanguageModel, config: NoiseConfig) -> Iterator[None]:
    """Drop out and add noise as configured, in training mode only.

    Raises:
        UserError: the model has no place for a dropout that is set.
    """
    with dropout(lm, config.dropout):
        if not config.neftune:
            yield
            return
        with neftune(lm, config.neftune):
            yield
