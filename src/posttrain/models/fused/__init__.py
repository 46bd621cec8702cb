"""What lies between a model's matrix products, in fewer passes over memory and with less kept for the gradient."""

from posttrain.models.fused.swap import fused

__all__ = ["fused"]
