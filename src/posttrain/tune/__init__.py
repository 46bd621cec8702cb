"""Searches the best settings of trainings, or of any function: `minimize`.

A study (`study`) keeps every trial, so that a killed search resumes; `driver` asks for the next points and runs their
trials as tasks of `posttrain.jobs`. `trainings` makes a trial of a training, and `merges` of a merge.
"""

from typing import TYPE_CHECKING, Any

__all__ = [
    "Choice",
    "Derived",
    "Float",
    "Infeasible",
    "Int",
    "Objective",
    "Space",
    "TrialContext",
    "TuneResult",
    "minimize",
    "spaces",
]

if TYPE_CHECKING:
    from posttrain.tune import spaces
    from posttrain.tune.api import minimize
    from posttrain.tune.context import Infeasible, TrialContext
    from posttrain.tune.objectives import Objective
    from posttrain.tune.parameters import Choice, Derived, Float, Int
    from posttrain.tune.result import TuneResult
    from posttrain.tune.space import Space


def __getattr__(name: str) -> Any:
    # On first use (PEP 562): Optuna takes half a second to import.
    from posttrain.store.extensions import lazy_exports

    modules = {
        "Choice": "parameters",
        "Derived": "parameters",
        "Float": "parameters",
        "Infeasible": "context",
        "Int": "parameters",
        "Objective": "objectives",
        "Space": "space",
        "TrialContext": "context",
        "TuneResult": "result",
        "minimize": "api",
        "spaces": "",
    }
    return lazy_exports(__name__, modules)(name)
