"""Filters records by scores of a language model: perplexity and instruction-following difficulty."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from pydantic import Field

from posttrain.data.records.outcome import Outcome
from posttrain.data.records.record import TextField, joined_texts
from posttrain.data.steps.bounds import Bound, apply_bounds
from posttrain.data.steps.resources import load_language_model, locate_model, model_key
from posttrain.data.steps.step import RowStep

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_AT_ONCE = 1024  # records; bounds the memory that their tokens take


class ModelStep(RowStep):
    """Base class of steps that score records under a language model, loaded once a process."""

    model: str = Field(description="Language model: a folder, a Hub id, a .gguf file, smollm2-135m or tiny.")

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"model": locate_model(self.model, root)})

    def check(self) -> None:
        locate_model(self.model, Path())

    def key(self) -> dict[str, Any]:
        return {**super().key(), "model": model_key(self.model)}

    def loaded(self) -> "LanguageModel":
        """Returns the language model.

        Raises:
            UserError: it is not a causal language model.
        """
        return load_language_model(self.model, "float32")


class Perplexity(ModelStep):
    """Keeps texts that a model finds neither garbled nor trite.

    The perplexity is exp of the mean negative log-probability of a text's tokens after the first; texts are
    read as they are, without a chat template. That noisy text has a high perplexity under a model of clean text is
    from Wenzek et al., "CCNet" (2020, arXiv:1911.00359). Which values are high depends on the model, so there are no
    bounds unless you set them. A text of one token or none has no perplexity, and stays.

    Facts: ``perplexity``.
    """

    name: ClassVar[str] = "perplexity"

    min_perplexity: float | None = Field(None, ge=1, description="Lowest perplexity that stays; null: no bound.")
    max_perplexity: float | None = Field(None, ge=1, description="Highest perplexity that stays; null: no bound.")
    field: TextField = Field("all", description="Text of a record to read: the input, the answer, or all.")

    def apply(self, table: pa.Table) -> Outcome:
        from posttrain.models.likelihood import text_log_likelihoods

        measure = np.full(table.num_rows, np.nan)
        # A worker whose tables are empty must not load a model.
        if table.num_rows:
            lm = self.loaded()
            sums, counts = text_log_likelihoods(lm, joined_texts(table, self.field))
            scored = counts > 0
            measure[scored] = np.exp(-sums[scored] / counts[scored])
        bounds = [
            Bound("predictable text", "perplexity", "at least", self.min_perplexity),
            Bound("improbable text", "perplexity", "at most", self.max_perplexity),
        ]
        return apply_bounds(table, self.name, {"perplexity": measure}, bounds)


class Difficulty(ModelStep):
    """Keeps records whose prompt makes the answer more likely, but does not contain it.

    Instruction-following difficulty (Li et al., "From Quantity to Quality", 2024, arXiv:2308.12032): how surprising
    the answer is given the prompt, over how surprising it is alone, as `posttrain.models.likelihood` computes it.
    Above 1 the prompt does not help, so the answer does not fit it; close to 0 the prompt contains the answer,
    and there is little to learn. Of a preference pair the better answer is read. Records without a prompt or an answer,
    and those longer than the model's context, have no difficulty, and stay.

    Facts: ``ifd``.
    """

    name: ClassVar[str] = "difficulty"
    needs_answers: ClassVar[bool] = True

    min_ifd: float | None = Field(None, ge=0, description="Lowest ratio of perplexities that stays; null: no bound.")
    max_ifd: float | None = Field(1.0, ge=0, description="Highest ratio of perplexities that stays; null: no bound.")

    def apply(self, table: pa.Table) -> Outcome:
        from posttrain.models.likelihood import instruction_following_difficulty

        measure = np.full(table.num_rows, np.nan)
        columns = (table[name].to_pylist() for name in ("prompt", "completion"))
        pairs = [
            (row, prompt, answer)
            for row, (prompt, answer) in enumerate(zip(*columns, strict=True))
            if prompt and answer is not None
        ]
        for start in range(0, len(pairs), _AT_ONCE):
            rows, prompts, answers = zip(*pairs[start : start + _AT_ONCE], strict=True)
            measure[list(rows)] = instruction_following_difficulty(self.loaded(), prompts, answers)
        bounds = [
            Bound("prompt gives the answer away", "ifd", "at least", self.min_ifd),
            Bound("prompt does not help", "ifd", "at most", self.max_ifd),
        ]
        return apply_bounds(table, self.name, {"ifd": measure}, bounds)
