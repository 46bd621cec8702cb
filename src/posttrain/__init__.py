"""posttrain keeps one loop turning for a language model.

collect → check → select → label → train → evaluate → decide → deploy

From Python: `train` trains a model on records, and `Workspace` is the loop, as ``posttrain`` is on the command line.
"""

import os
from typing import TYPE_CHECKING, Any

# OpenMP's threads wait for each other in a loop after each small product. Beside other programs each wait lasts as long
# as another program's turn: a training takes many times as long. So they sleep after a few turns of that loop, which
# costs a few percent at most on a quiet machine (benchmarks/results/training.md). OpenMP reads it when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

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
