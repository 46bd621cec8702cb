"""Weight standardisation: train convolutions whose filters have mean 0 and variance 1."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError

_MIN_DEVIATION = 1e-5  # standard deviation, so that a filter of equal weights does not divide by 0


@contextmanager
def standardize_weights(lm: LanguageModel) -> Iterator[None]:
    """Trains convolutions with standardised weights, which stay in the model afterwards.

    S. Qiao et al., Micro-Batch Training with Batch-Channel Normalization and Weight Standardization, 2019,
    arXiv:1903.10520: each filter less its mean and by its standard deviation, over all inputs of an output channel.
    transformers' ``Conv1D`` is a linear layer, and filters of a single weight would be 0: neither is touched.

    Raises:
        UserError: the model has no such convolution that is trained.
    """
    convolutions = [
        module
        for module in lm.model.modules()
        if isinstance(module, _ConvNd) and module.weight.requires_grad and module.weight[0].numel() > 1
    ]
    if not convolutions:
        raise UserError(
            f"{lm.model.config.model_type} has no convolution that is trained",
            where="train.weight_standardization",
            fix="set it to false",
        )
    for module in convolutions:
        parametrize.register_parametrization(module, "weight", _Standardized())
    try:
        yield
    finally:
        for module in convolutions:
            # The standardised weights become the model's own, so that serving it needs nothing of this.
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


class _Standardized(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        # In 16 bits each of the next steps would round the filters once more.
        filters = weight.float().flatten(1)
        centred = filters - filters.mean(1, keepdim=True)
        deviation = (centred.square().mean(1, keepdim=True) + _MIN_DEVIATION**2).sqrt()
        standardized: Tensor = (centred / deviation).view_as(weight).to(weight.dtype)
        return standardized
