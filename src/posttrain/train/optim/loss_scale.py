"""Dynamic loss scaling, which keeps float16 gradients from underflow and overflow."""

import math
from typing import Any

from posttrain.store.errors import WorkError

INITIAL = 2.0**16

_GROWTH, _BACKOFF = 2.0, 0.5
"""Factors on the scale: after `GROWTH_INTERVAL` steps without an overflow, and at an overflow."""

GROWTH_INTERVAL = 2000

_MINIMUM = 1.0
"""Smallest scale; training stops if gradients overflow there."""


class LossScale:
    """Scales the loss, and so the gradients, and adapts the scale from step to step.

    P. Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740, section 3.2: multiply the loss, divide
    the gradients once they are added up in float32. A step whose gradients overflowed is left out and the scale backs
    off; after `GROWTH_INTERVAL` good steps in a row it grows.

    Args:
        enabled: False: the scale stays 1, and nothing counts as an overflow.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.value = INITIAL if enabled else 1.0
        self._good = 0  # steps since the scale last changed
        self._overflows = 0

    def overflowed(self, loss: float, norm: float) -> bool:
        """Returns whether the gradients of a step overflowed and its loss did not.

        Args:
            loss: the step's loss; if that is NaN or infinite itself, a smaller scale does not help.
            norm: norm of the float32 sums of its gradients.
        """
        return self.enabled and math.isfinite(loss) and not math.isfinite(norm)

    def after(self, *, overflowed: bool) -> None:
        """Adapts the scale to the outcome of a step.

        Raises:
            WorkError: the scale cannot back off any further.
        """
        if overflowed:
            self.value, self._good = self.value * _BACKOFF, 0
            self._overflows += 1
            if self.value < _MINIMUM:
                raise WorkError(
                    f"float16 gradients overflowed in {self._overflows} steps, which were skipped, and even with the "
                    f"loss scaled by {self.value / _BACKOFF:g}; train with train.precision=bfloat16, or at "
                    "a lower train.learning_rate"
                )
            return
        self._good += 1
        # Grows slowly and backs off at once: an overflow costs a step, a low scale costs only small gradients.
        if self.enabled and self._good == GROWTH_INTERVAL:
            self.value, self._good = self.value * _GROWTH, 0

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON."""
        return {"enabled": self.enabled, "value": self.value, "good": self._good, "overflows": self._overflows}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned, unless it is of a training in another precision."""
        if self.enabled != state["enabled"]:
            return
        self.value, self._good = float(state["value"]), int(state["good"])
        self._overflows = int(state["overflows"])
