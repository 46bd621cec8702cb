"""How much of an answer a prompt gives a language model."""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from posttrain.data.steps.bounds import Bound, judge
from posttrain.data.steps.model_step import ModelStep
from posttrain.data.steps.step import Outcome

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

_AT_ONCE = 1024  # records whose tokens are held


class Difficulty(ModelStep):
    """Records whose prompt makes the answer likelier stay, in so far as they lie within the bounds.

    Instruction-following difficulty (Li et al., "From Quantity to Quality", 2024, arXiv:2308.12032): how surprising
    the answer is given the prompt, over how surprising it is alone; here as a ratio of perplexities, as in the same
    authors' "Superfiltering" (2024, arXiv:2402.00530). Above 1 the prompt does not help, and the two do not belong
    together; close to 0 the answer is told by the prompt, and there is little to learn. The prompt is rendered by the
    model's chat template; the answer alone follows the token that begins a text, or ends one where there is none, so
    that both count the same tokens, the stop token included. Of a preference pair the better answer is read. Records
    without a prompt or an answer, and those longer than the model's context, have no difficulty, and stay.

    Facts: ``ifd``.
    """

    name: ClassVar[str] = "difficulty"
    needs_answers: ClassVar[bool] = True

    min_ifd: float | None = Field(None, ge=0, description="lowest ratio of perplexities that stays; null: no bound")
    max_ifd: float | None = Field(1.0, ge=0, description="highest ratio of perplexities that stays; null: no bound")

    def apply(self, table: pa.Table) -> Outcome:
        measure = np.full(table.num_rows, np.nan)
        columns = (table[name].to_pylist() for name in ("prompt", "completion"))
        asked = [
            (row, prompt, answer)
            for row, (prompt, answer) in enumerate(zip(*columns, strict=True))
            if prompt and answer is not None
        ]
        for start in range(0, len(asked), _AT_ONCE):
            rows, prompts, answers = zip(*asked[start : start + _AT_ONCE], strict=True)
            lm = self.loaded()
            measure[list(rows)] = instruction_following_difficulty(lm, list(prompts), list(answers))
        bounds = [
            Bound("prompt gives the answer away", "ifd", "at least", self.min_ifd),
            Bound("prompt does not help", "ifd", "at most", self.max_ifd),
        ]
        return judge(table, self.name, {"ifd": measure}, bounds)


def instruction_following_difficulty(
    lm: "LanguageModel", prompts: list[list[dict[str, str]]], answers: list[str]
) -> npt.NDArray[np.float64]:
    """Perplexity of each answer after its prompt over that of the answer alone, float64 [N]; NaN beyond the context."""
    from posttrain.models.chat import Encoded
    from posttrain.models.text_likelihood import context, log_likelihoods

    beginning = lm.tokenizer.bos_token_id
    if beginning is None:
        beginning = min(lm.chat.stop_ids)
    given, alone = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        before, ids = lm.prompt_ids(prompt), lm.answer_ids(answer)
        given.append(Encoded(before + ids, [False] * len(before) + [True] * len(ids)))
        alone.append(Encoded([beginning, *ids], [False] + [True] * len(ids)))
    longest = context(lm)
    fits = np.array([len(one.ids) <= longest for one in given], dtype=bool)
    found = np.full(len(given), np.nan)
    for_given, counts = log_likelihoods(lm, [one for one, fit in zip(given, fits, strict=True) if fit], longest)
    for_alone, _ = log_likelihoods(lm, [one for one, fit in zip(alone, fits, strict=True) if fit], longest)
    found[fits] = np.exp((for_alone - for_given) / counts)
    return found
