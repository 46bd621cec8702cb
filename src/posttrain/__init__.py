"""posttrain keeps one loop turning for a language model.

collect → check → select → label → train → evaluate → decide → deploy

From Python: `train` trains a model on records, and `Workspace` is the loop, as ``posttrain`` is on the command line.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Callback", "Models", "StepValues", "TrainResult", "UserError", "WorkError", "Workspace", "train"]

if TYPE_CHECKING:
    from posttrain.api.models import Models
    from posttrain.api.workspace import Workspace
    from posttrain.store.errors import UserError, WorkError
    from posttrain.train.api import TrainResult, train
    from posttrain.train.callbacks import Callback
    from posttrain.train.monitor.metrics import StepValues


def __getattr__(name: str) -> Any:
    # On first use (PEP 562): most need torch or the config, and the version is read by every command.
    from posttrain.store.extensions import lazy_exports

    modules = {
        "Callback": "train.callbacks",
        "Models": "api.models",
        "StepValues": "train.monitor.metrics",
        "TrainResult": "train.api",
        "UserError": "store.errors",
        "WorkError": "store.errors",
        "Workspace": "api.workspace",
        "train": "",
        "tune": "",
    }
    return lazy_exports(__name__, modules)(name)
