"""The scorers by name."""

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers.base import Scored, Scorer
from posttrain.evaluate.scorers.exact_match import EXACT_MATCH
from posttrain.evaluate.scorers.label_likelihood import LABEL_LIKELIHOOD
from posttrain.evaluate.scorers.perplexity import PERPLEXITY
from posttrain.evaluate.scorers.python_function import PYTHON
from posttrain.evaluate.scorers.regex import REGEX
from posttrain.evaluate.scorers.token_f1 import TOKEN_F1

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


__all__ = ["SCORERS", "Scored", "Scorer", "scorer_name"]
