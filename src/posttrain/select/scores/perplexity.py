"""How surprising a record's input is to the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from posttrain.select.scores.group import Asked, Group

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_AT_ONCE = 256


def perplexity_group() -> Group:
    """``perplexity`` of the input's words, without system message and template; NaN for fewer than two tokens."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.text_likelihood import text_log_likelihoods

        texts = ["\n".join(turn["content"] for turn in one.prompt) for one in records]
        sums, counts = text_log_likelihoods(lm, texts)
        found = np.full(len(texts), np.nan)
        told = counts > 0
        found[told] = np.exp(-sums[told] / counts[told])
        return pa.table({"perplexity": pa.array(found, pa.float64())})

    return Group("perplexity", 1, {}, score, _AT_ONCE)
