"""Train a model on records, and resume to the same weights.

`trainer.py` shows a training step from top to bottom:

    units       micro-batches of packed records, tokenised ahead (`data/`)
    gradients   forward and backward of an objective (`objectives/`), summed over the step
    decision    the monitor may skip the step or roll back (`monitor/`, `recovery.py`)
    update      float32 master weights, optimiser and schedule (`optim/`)
    after it    metrics, an evaluation on held-out records (`evaluation.py`), a checkpoint (`checkpoint/`)

`setup.py` builds these parts and enters what changes the model while it trains, such as noise (`regularization/`) or
recomputed activations (`memory/`); `step_hooks.py` has the hooks of a step.

`stage.py` trains on a training set: for a round of the loop, and for `standalone.py`, which is `posttrain train`.
`api.py` is its Python form. The package can be called: ``from posttrain import train`` is `posttrain.train.api.train`.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from posttrain.store.extensions import lazy_exports

if TYPE_CHECKING:
    from posttrain.train.api import train

__all__ = ["train"]

__getattr__ = lazy_exports(__name__, {"train": "api"})


class _CallablePackage(ModuleType):
    """Forwards calls to the function of the package's name."""

    # Python binds a package to its name in the parent package, so that no function of this name could stay there.
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Trains a model on records: see `posttrain.train.api.train`."""
        return self.train(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
