"""Training. The package can be called: ``from posttrain import train`` is `posttrain.train.api.train`.

The loop's stage calls `posttrain.train.stage.train`.
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
