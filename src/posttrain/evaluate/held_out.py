"""Scores the answers of a model on held-out records while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import SCORERS
from posttrain.evaluate.scorers.base import read_examples
from posttrain.evaluate.scorers.likelihood import label_indices, preference_pairs
from posttrain.evaluate.suite import run_suite
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, suggest

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

SCORERS_KEY = "train.evaluate.metrics"


@dataclass(frozen=True)
class HeldOutScore:
    """Runs some scorers, whose metrics are named ``SCORER/METRIC``; of a scorer's first one, higher is better.

    Args:
        scorers: names of scorers that need no settings.
        task: the task of the models.
    """

    scorers: Sequence[str]
    task: TaskConfig

    def check(self, records: pa.Table) -> None:
        """Raises a UserError that names the first record which a scorer cannot score."""
        examples = read_examples(records, SCORERS_KEY)
        examples.answers(SCORERS_KEY)
        for name in self.scorers:
            if not SCORERS[name].plain_text:
                examples.check_prompts(SCORERS_KEY)
            if SCORERS[name].needs_labels:
                label_indices(examples, self.task.label_set, SCORERS_KEY)
            if name == "preference":
                preference_pairs(examples, SCORERS_KEY)

    def __call__(self, model: LanguageModel, records: pa.Table) -> dict[str, float]:
        """Scores a model on records."""
        values: dict[str, float] = {}
        for name in self.scorers:
            result = run_suite(model, records, SuiteConfig(scorer=name), "test", where=SCORERS_KEY)
            metrics = {result.paired: result.metrics[result.paired], **result.metrics}
            values |= {f"{name}/{metric}": value for metric, value in metrics.items()}
        return values


def held_out_score(scorers: Sequence[str], task: TaskConfig) -> HeldOutScore | None:
    """Returns the scores of ``train.evaluate.metrics``; None without any.

    Raises:
        UserError: there is no such scorer, or it needs settings, or labels that the task does not have.
    """
    for name in scorers:
        if name not in SCORERS:
            raise UserError(f"there is no scorer `{name}`", where=SCORERS_KEY, fix=suggest(name, SCORERS))
        if name in ("regex", "python"):
            fix = "take another, or measure the trained model by a suite of a workspace"
            raise UserError(f"scorer {name} has settings of its own", where=SCORERS_KEY, fix=fix)
        if SCORERS.load(name, SCORERS_KEY).needs_labels and not task.label_set:
            raise UserError(f"scorer {name} needs a label set", where=SCORERS_KEY, fix="set `task.labels`")
    return HeldOutScore(scorers, task) if scorers else None
