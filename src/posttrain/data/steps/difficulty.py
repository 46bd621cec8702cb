"""How much of an answer a prompt gives a language model."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from posttrain.data.steps.bounds import Bound, judge
from posttrain.data.steps.model_step import ModelStep
from posttrain.data.steps.step import Outcome

_AT_ONCE = 1024  # records whose tokens are held


class Difficulty(ModelStep):
    """Records whose prompt makes the answer likelier stay, in so far as they lie within the bounds.

    Instruction-following difficulty (Li et al., "From Quantity to Quality", 2024, arXiv:2308.12032): how surprising
    the answer is given the prompt, over how surprising it is alone, as `posttrain.models.instruction_difficulty` says.
    Above 1 the prompt does not help, and the two do not belong together; close to 0 the answer is told by the prompt,
    and there is little to learn. Of a preference pair the better answer is read. Records without a prompt or an answer,
    and those longer than the model's context, have no difficulty, and stay.

    Facts: ``ifd``.
    """

    name: ClassVar[str] = "difficulty"
    needs_answers: ClassVar[bool] = True

    min_ifd: float | None = Field(None, ge=0, description="lowest ratio of perplexities that stays; null: no bound")
    max_ifd: float | None = Field(1.0, ge=0, description="highest ratio of perplexities that stays; null: no bound")

    def apply(self, table: pa.Table) -> Outcome:
        from posttrain.models.instruction_difficulty import instruction_following_difficulty

        measure = np.full(table.num_rows, np.nan)
        columns = (table[name].to_pylist() for name in ("prompt", "completion"))
        asked = [
            (row, prompt, answer)
            for row, (prompt, answer) in enumerate(zip(*columns, strict=True))
            if prompt and answer is not None
        ]
        for start in range(0, len(asked), _AT_ONCE):
            rows, prompts, answers = zip(*asked[start : start + _AT_ONCE], strict=True)
            measure[list(rows)] = instruction_following_difficulty(self.loaded(), prompts, answers)
        bounds = [
            Bound("prompt gives the answer away", "ifd", "at least", self.min_ifd),
            Bound("prompt does not help", "ifd", "at most", self.max_ifd),
        ]
        return judge(table, self.name, {"ifd": measure}, bounds)
