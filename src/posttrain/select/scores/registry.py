"""Registry of scores: the tasks each is for, and whether a high value means uncertain."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.store.errors import UserError, suggest


@dataclass(frozen=True)
class ScoreSpec:
    """One score.

    Attributes:
        of: the tasks that it is for: with a closed label set, with free text, or any; or labelled records only.
        doubt: 1 where a great value means that the model is unsure, -1 where a small one does.
        meaning: in a few words.
    """

    of: Literal["labels", "text", "any", "labelled"]
    doubt: Literal[1, -1]
    meaning: str


SCORES: dict[str, ScoreSpec] = {
    "bald": ScoreSpec("labels", 1, "mutual information of label and weights, over passes with dropout"),
    "vote_entropy": ScoreSpec("labels", 1, "entropy of the votes of earlier champions"),
    "consensus_kl": ScoreSpec("labels", 1, "mean divergence of earlier champions from their mean"),
    "log_probability": ScoreSpec("text", -1, "log-probability of the greedy answer"),
    "log_probability_variance": ScoreSpec("text", 1, "variance of the sampled answers' log-probabilities"),
    "token_entropy": ScoreSpec("text", 1, "mean entropy of the greedy answer's tokens"),
    "lexical_diversity": ScoreSpec("text", 1, "one minus the mean ROUGE-1 between sampled answers"),
    "self_consistency": ScoreSpec("text", -1, "share of sampled answers that are the most frequent one"),
    "semantic_entropy": ScoreSpec("text", 1, "entropy over groups of answers with like embeddings"),
    "semantic_entropy_discrete": ScoreSpec("text", 1, "the same, of the groups' sizes"),
    "entailment_entropy": ScoreSpec("text", 1, "entropy over groups of answers that entail each other"),
    "entailment_entropy_discrete": ScoreSpec("text", 1, "the same, of the groups' sizes"),
    "perplexity": ScoreSpec("any", 1, "perplexity of the input"),
    "verbalised_confidence": ScoreSpec("any", -1, "how sure the model says that it is of its answer"),
    "loss": ScoreSpec("labelled", 1, "nats a token of the right answer"),
    "gradient_norm": ScoreSpec("labelled", 1, "norm of that loss's gradient in the output layer"),
    "instruction_difficulty": ScoreSpec(
        "labelled", 1, "perplexity of the right answer after its prompt over that without"
    ),
    "forgetting_events": ScoreSpec("labelled", 1, "how often a later model gets wrong what the one before got right"),
}

BASE_MEASURES = {"entropy": 1, "least_confidence": 1, "margin": -1, "confidence": -1}
"""Measures that every pool's table has, with the sign that makes a great value doubt."""

UNCERTAINTY_SIGN: Mapping[str, int] = {
    **BASE_MEASURES,
    **{name: one.doubt for name, one in SCORES.items() if one.of != "labelled"},
}
"""Columns of the pool's table that say how unsure the model is, with the sign that makes a great value doubt."""


def check_score_names(names: Iterable[str]) -> None:
    """Raise a ValueError that names the nearest score for one that does not exist."""
    for name in names:
        if name in BASE_MEASURES:
            raise ValueError(f"`{name}` is always computed")
        if name not in SCORES:
            raise ValueError(f"no score `{name}`; {suggest(name, SCORES)}")


def requested_scores(scores: Iterable[str], options: Mapping[str, Any]) -> list[str]:
    """The scores named in the config, and those that a strategy's options go by; each once, by name."""
    named = [value for key in ("by", "hard") if isinstance(value := options.get(key), str) and value in SCORES]
    return sorted({*scores, *named})


def check_scores_fit_task(names: Iterable[str], has_labels: bool, options: Mapping[str, Any]) -> None:
    """Find out before any work whether the scores say anything of the task.

    Args:
        has_labels: whether the task has a closed label set.
        options: the strategy's; what they go by is a column of the pool.

    Raises:
        UserError: if one does not.
    """
    chosen_by = {str(options.get(key)) for key in ("by", "hard")}
    for name in names:
        of = SCORES[name].of
        if of == "labels" and not has_labels:
            raise UserError(
                f"score `{name}` goes by the probabilities of labels, and free text has none",
                where="select.scores",
                fix="use semantic_entropy or token_entropy, or set `task.labels`",
            )
        if of == "text" and has_labels:
            raise UserError(
                f"score `{name}` is of written answers, and this task has a closed label set",
                where="select.scores",
                fix="use entropy, margin or bald, or leave `task.labels` out",
            )
        if of == "labelled" and name in chosen_by:
            raise UserError(
                f"score `{name}` needs the right answer, which no pool record has",
                where="select.options",
                fix="choose by what says how unsure the model is, such as entropy",
            )
