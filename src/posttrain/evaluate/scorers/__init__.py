"""The scorers by name."""

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers.base import Scorer, ScorerOutput
from posttrain.evaluate.scorers.generation import EXACT_MATCH, PYTHON, REGEX, TOKEN_F1
from posttrain.evaluate.scorers.likelihood import LABEL_LIKELIHOOD, PERPLEXITY

SCORERS: dict[str, Scorer] = {
    "exact_match": EXACT_MATCH,
    "label_likelihood": LABEL_LIKELIHOOD,
    "regex": REGEX,
    "token_f1": TOKEN_F1,
    "perplexity": PERPLEXITY,
    "python": PYTHON,
}


def scorer_name(suite: SuiteConfig, has_labels: bool) -> str:
    """The suite's scorer, or the default for its task."""
    return suite.scorer or ("label_likelihood" if has_labels else "exact_match")


__all__ = ["SCORERS", "Scorer", "ScorerOutput", "scorer_name"]
