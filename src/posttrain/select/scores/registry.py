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
"""Computes one number a record: float [N] for N records."""


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


_HERE = "posttrain.select.scores"
_BUILTIN = {
    "bald": ScoreSpec(
        "labels", 1, "mutual information of label and weights, over passes with dropout", f"{_HERE}.labels:score_bald"
    ),
    "vote_entropy": ScoreSpec(
        "labels", 1, "entropy of the votes of earlier champions", f"{_HERE}.labels:score_vote_entropy"
    ),
    "consensus_kl": ScoreSpec(
        "labels", 1, "mean divergence of earlier champions from their mean", f"{_HERE}.labels:score_consensus_kl"
    ),
    "log_probability": ScoreSpec(
        "text", -1, "log-probability of the greedy answer", f"{_HERE}.answers:score_log_probability"
    ),
    "log_probability_variance": ScoreSpec(
        "text",
        1,
        "variance of the sampled answers' log-probabilities",
        f"{_HERE}.sampled_answers:score_log_probability_variance",
    ),
    "token_entropy": ScoreSpec(
        "text", 1, "mean entropy of the greedy answer's tokens", f"{_HERE}.answers:score_token_entropy"
    ),
    "lexical_diversity": ScoreSpec(
        "text",
        1,
        "one minus the mean ROUGE-1 between sampled answers",
        f"{_HERE}.sampled_answers:score_lexical_diversity",
    ),
    "self_consistency": ScoreSpec(
        "text",
        -1,
        "share of sampled answers that are the most frequent one",
        f"{_HERE}.sampled_answers:score_self_consistency",
    ),
    "semantic_entropy": ScoreSpec(
        "text",
        1,
        "entropy over clusters of answers with similar embeddings",
        f"{_HERE}.semantic_entropy:score_semantic_entropy",
    ),
    "semantic_entropy_discrete": ScoreSpec(
        "text",
        1,
        "the same, from the clusters' sizes alone",
        f"{_HERE}.semantic_entropy:score_semantic_entropy_discrete",
    ),
    "entailment_entropy": ScoreSpec(
        "text",
        1,
        "entropy over clusters of answers that entail each other",
        f"{_HERE}.semantic_entropy:score_entailment_entropy",
    ),
    "entailment_entropy_discrete": ScoreSpec(
        "text",
        1,
        "the same, from the clusters' sizes alone",
        f"{_HERE}.semantic_entropy:score_entailment_entropy_discrete",
    ),
    "perplexity": ScoreSpec("any", 1, "perplexity of the input", f"{_HERE}.answers:score_perplexity"),
    "verbalised_confidence": ScoreSpec(
        "any", -1, "confidence that the model states in its answer", f"{_HERE}.answers:score_verbalised_confidence"
    ),
    "loss": ScoreSpec("labelled", 1, "nats a token of the right answer", f"{_HERE}.labelled:score_loss"),
    "gradient_norm": ScoreSpec(
        "labelled", 1, "norm of that loss's gradient in the output layer", f"{_HERE}.labelled:score_gradient_norm"
    ),
    "instruction_difficulty": ScoreSpec(
        "labelled",
        1,
        "perplexity of the right answer after its prompt over that without",
        f"{_HERE}.labelled:score_instruction_difficulty",
    ),
    "forgetting_events": ScoreSpec(
        "labelled",
        1,
        "times that a later model gets wrong what the one before got right",
        f"{_HERE}.labelled:score_forgetting_events",
    ),
}


SCORES: Registry[ScoreSpec] = Registry("score", "posttrain.scores", _BUILTIN, ScoreSpec)

BASE_MEASURES = {"entropy": 1, "least_confidence": 1, "margin": -1, "confidence": -1}
"""Measures that every pool's table has, with the sign that makes a high value mean uncertain."""


def uncertainty_sign(name: str) -> int | None:
    """Returns the sign that makes a high value of a column mean uncertain; None if it is no measure of the pool.

    A published score is imported when its own name is looked up, and never for another.
    """
    if name in BASE_MEASURES:
        return BASE_MEASURES[name]
    # Scores of labelled records are no columns of the pool's table.
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
    """Returns the scores named in the config and those that a selector's options use; each once, by name."""
    used = [value for key in ("by", "hard") if isinstance(value := options.get(key), str) and value in SCORES]
    return sorted({*scores, *used})


def check_scores_fit_task(names: Iterable[str], has_labels: bool, options: Mapping[str, Any]) -> None:
    """Checks, before any work, that the scores apply to the task.

    Args:
        names: names of the scores.
        has_labels: the task has a closed label set.
        options: options of the selector; the scores that they use must be columns of the pool.

    Raises:
        UserError: if one does not.
    """
    used = {str(options.get(key)) for key in ("by", "hard")}
    for name in names:
        task = SCORES.load(name, "select.options" if name in used else "select.scores").task
        if task == "labels" and not has_labels:
            raise UserError(
                f"score `{name}` needs label probabilities, and free text has none",
                where="select.scores",
                fix="use semantic_entropy or token_entropy, or set `task.labels`",
            )
        if task == "text" and has_labels:
            raise UserError(
                f"score `{name}` is for written answers, and this task has a closed label set",
                where="select.scores",
                fix="use entropy, margin or bald, or leave `task.labels` out",
            )
        if task == "labelled" and name in used:
            raise UserError(
                f"score `{name}` needs the right answer, which no pool record has",
                where="select.options",
                fix="choose by a measure of uncertainty, such as entropy",
            )
