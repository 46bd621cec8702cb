"""Registry of scores: each with its tasks, the direction that means uncertain, and the function that computes it.

Other packages add a score with a `ScoreSpec` as an entry point of the group ``posttrain.scores``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry

if TYPE_CHECKING:
    import numpy.typing as npt

    from posttrain.select.scores.context import ScoringBatch

ScoreFunction = Callable[["ScoringBatch"], "npt.ArrayLike"]
"""Computes one number per record: float [N] for N records."""


@dataclass(frozen=True)
class ScoreSpec:
    """A score of records, which becomes a column of the score table.

    Attributes:
        task: tasks that it is for: a closed label set, free text, or any; or labelled records only.
        sign: 1 where a high value means that the model is uncertain, -1 where a low one does.
        summary: a few words for help texts.
        function: the function that computes it, or its dotted path.
    """

    task: Literal["labels", "text", "any", "labelled"]
    sign: Literal[1, -1]
    summary: str
    function: ScoreFunction | str

    def compute(self, batch: "ScoringBatch") -> "npt.ArrayLike":
        """Computes the score of each record, float [N]."""
        function = self.function
        if isinstance(function, str):  # imported on use: the config lists scores without loading torch
            module, _, name = function.partition(":")
            function = getattr(import_module(module), name)
        values: npt.ArrayLike = function(batch)
        return values


_HERE = "posttrain.select.scores.answers"
_BUILTIN = {
    "perplexity": ScoreSpec("any", 1, "perplexity of the input", f"{_HERE}:score_perplexity"),
    "loss": ScoreSpec("labelled", 1, "nats per token of the right answer", f"{_HERE}:score_loss"),
}


SCORES: Registry[ScoreSpec] = Registry("score", "posttrain.scores", _BUILTIN, ScoreSpec)

BASE_MEASURES = {"entropy": 1, "least_confidence": 1, "margin": -1, "confidence": -1}
"""Measures that every pool's table has, with the sign that makes a high value mean uncertain."""


def uncertainty_sign(name: str) -> int | None:
    """Returns the sign that makes a high value of a column mean uncertain; None if it is not a measure of the pool.

    A published score is imported when its own name is looked up, and never for another.
    """
    if name in BASE_MEASURES:
        return BASE_MEASURES[name]
    # Scores of labelled records are not columns of the pool's table.
    return SCORES[name].sign if name in SCORES and SCORES[name].task != "labelled" else None


def check_score_names(names: Iterable[str]) -> None:
    """Raises a ValueError with the most similar name for a score that does not exist."""
    for name in names:
        if name in BASE_MEASURES:
            raise ValueError(f"`{name}` is always computed")
        if name not in SCORES:
            raise ValueError(f"no score `{name}`; {suggest(name, SCORES)}")
        SCORES.check(name)


def requested_scores(scores: Iterable[str], options: Mapping[str, Any]) -> list[str]:
    """Returns the scores named in the config and the one that a selector's options use; each once, by name."""
    by = options.get("by")
    return sorted({*scores, *([by] if isinstance(by, str) and by in SCORES else [])})


def check_scores_fit_task(names: Iterable[str], has_labels: bool, options: Mapping[str, Any]) -> None:
    """Checks, before any work, that the scores apply to the task.

    Args:
        names: names of the scores.
        has_labels: the task has a closed label set.
        options: options of the selector; the scores that they use must be columns of the pool.

    Raises:
        UserError: if one does not.
    """
    used = options.get("by")
    for name in names:
        task = SCORES.load(name, "select.options" if name == used else "select.scores").task
        if task == "labels" and not has_labels:
            raise UserError(
                f"score `{name}` needs label probabilities, and free text has none",
                where="select.scores",
                fix="use entropy or perplexity, or set `task.labels`",
            )
        if task == "text" and has_labels:
            raise UserError(
                f"score `{name}` is for written answers, and this task has a closed label set",
                where="select.scores",
                fix="use entropy or margin, or leave `task.labels` out",
            )
        if task == "labelled" and name == used:
            raise UserError(
                f"score `{name}` needs the right answer, which no pool record has",
                where="select.options",
                fix="choose by a measure of uncertainty, such as entropy",
            )
