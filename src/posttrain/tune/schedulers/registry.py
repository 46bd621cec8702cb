"""The schedulers by name."""

from collections.abc import Callable
from typing import Any

from posttrain.store.extensions import Registry
from posttrain.tune.parts import check_part, make_part
from posttrain.tune.schedulers.base import Scheduler

SCHEDULERS: Registry[Callable[..., Scheduler]] = Registry(
    "scheduler",
    "posttrain.schedulers",
    {
        "none": "posttrain.tune.schedulers.none:RunToEnd",
        "successive_halving": "posttrain.tune.schedulers.successive_halving:SuccessiveHalving",
        "asha": "posttrain.tune.schedulers.asha:Asha",
        "hyperband": "posttrain.tune.schedulers.hyperband:Hyperband",
        "early_stopping": "posttrain.tune.schedulers.early_stopping:EarlyStopping",
        "pbt": "posttrain.tune.schedulers.population:Pbt",
    },
)
"""A function of the scheduler's options, by name."""


def make_scheduler(value: Any) -> Scheduler:
    """Makes a scheduler.

    Args:
        value: a name, a mapping of ``name`` and options, or a scheduler as it is.

    Raises:
        UserError: there is no such scheduler, or it has no such option, or lacks one.
    """
    return value if isinstance(value, Scheduler) else make_part(SCHEDULERS, value, "scheduler")


def check_scheduler(value: Any, where: str) -> None:
    """Raises a `UserError` as `make_scheduler` does, without making the scheduler.

    Args:
        value: a name, or a mapping of ``name`` and options.
        where: the key, named in errors.
    """
    check_part(SCHEDULERS, value, where, 0)
