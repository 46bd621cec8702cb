"""Scores the answers of a model on held-out records while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import SCORERS
from posttrain.evaluate.suite import run_suite
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, suggest

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


SCORERS_KEY = "train.evaluate.metrics"


def held_out_score(
    scorers: Sequence[str], task: TaskConfig, where: str = SCORERS_KEY
) -> Callable[[LanguageModel, pa.Table], dict[str, float]] | None:
    """Returns a function of a model and records that runs some scorers; None without any.

    Its metrics are named ``SCORER/METRIC``; each scorer's first is the one in which higher is better.

    Args:
        scorers: names of scorers that need no settings.
        task: the task of the model.
        where: the config key, named in errors.

    Raises:
        UserError: there is no such scorer, or it needs settings, or labels that the task does not have.
    """
    for name in scorers:
        if name not in SCORERS:
            raise UserError(f"there is no scorer `{name}`", where=where, fix=suggest(name, SCORERS))
        if name in ("regex", "python"):
            fix = "take another, or measure the trained model by a suite of a workspace"
            raise UserError(f"scorer {name} has settings of its own", where=where, fix=fix)
        if SCORERS.load(name, where).needs_labels and not task.label_set:
            raise UserError(f"scorer {name} needs a label set", where=where, fix="set `task.labels`")

    def score(model: LanguageModel, records: pa.Table) -> dict[str, float]:
        values: dict[str, float] = {}
        for name in scorers:
            result = run_suite(model, records, SuiteConfig(scorer=name), "test", where=where)
            metrics = {result.paired: result.metrics[result.paired], **result.metrics}
            values |= {f"{name}/{metric}": value for metric, value in metrics.items()}
        return values

    return score if scorers else None
