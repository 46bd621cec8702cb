"""The scorers by name: built-in ones, and those of entry points in the group ``posttrain.scorers``."""

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers.base import Scorer, ScorerOutput
from posttrain.store.extensions import Registry

SCORERS: Registry[Scorer] = Registry(
    "scorer",
    "posttrain.scorers",
    {
        "exact_match": "posttrain.evaluate.scorers.generation:EXACT_MATCH",
        "label_likelihood": "posttrain.evaluate.scorers.likelihood:LABEL_LIKELIHOOD",
        "regex": "posttrain.evaluate.scorers.generation:REGEX",
        "token_f1": "posttrain.evaluate.scorers.generation:TOKEN_F1",
        "perplexity": "posttrain.evaluate.scorers.likelihood:PERPLEXITY",
        "preference": "posttrain.evaluate.scorers.likelihood:PREFERENCE",
        "python": "posttrain.evaluate.scorers.generation:PYTHON",
        "rating": "posttrain.evaluate.scorers.parts:RATING",
        "choices": "posttrain.evaluate.scorers.parts:CHOICES",
        "spans": "posttrain.evaluate.scorers.parts:SPANS",
    },
    Scorer,
)


def scorer_name(suite: SuiteConfig, has_labels: bool) -> str:
    """Returns the suite's scorer, or the default for a task with or without a label set."""
    return suite.scorer or ("label_likelihood" if has_labels else "exact_match")


__all__ = ["SCORERS", "Scorer", "ScorerOutput", "scorer_name"]
