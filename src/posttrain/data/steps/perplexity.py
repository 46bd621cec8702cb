"""How probable records are to a language model."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from posttrain.data.records.normalise import Field as Words
from posttrain.data.records.normalise import texts_of
from posttrain.data.steps.bounds import Bound, judge
from posttrain.data.steps.model_step import ModelStep
from posttrain.data.steps.step import Outcome


class Perplexity(ModelStep):
    """Texts that a model finds neither garbled nor trite stay.

    The perplexity is exp of the mean negative log-probability of a text's tokens, its first left out; the words are
    read as plain text, without a chat template. That noisy text has a high perplexity under a model of clean text is
    from Wenzek et al., "CCNet" (2020, arXiv:1911.00359). Which numbers are high hangs on the model, so there are no
    bounds unless they are set. A text of one token or none has no perplexity, and stays.

    Facts: ``perplexity``.
    """

    name: ClassVar[str] = "perplexity"

    min_perplexity: float | None = Field(None, ge=1, description="lowest perplexity that stays; null: no bound")
    max_perplexity: float | None = Field(None, ge=1, description="highest perplexity that stays; null: no bound")
    field: Words = Field("all", description="which words of a record are read: input, answer or all")

    def apply(self, table: pa.Table) -> Outcome:
        from posttrain.models.text_likelihood import text_log_likelihoods

        measure = np.full(table.num_rows, np.nan)
        if table.num_rows:
            lm = self.loaded()
            sums, counts = text_log_likelihoods(lm, texts_of(table, self.field))
            told = counts > 0
            measure[told] = np.exp(-sums[told] / counts[told])
        bounds = [
            Bound("predictable text", "perplexity", "at least", self.min_perplexity),
            Bound("improbable text", "perplexity", "at most", self.max_perplexity),
        ]
        return judge(table, self.name, {"perplexity": measure}, bounds)
