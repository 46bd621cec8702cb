"""How much of an answer a prompt gives a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from posttrain.models.chat import Encoded
from posttrain.models.text_likelihood import context, log_likelihoods

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel
    from posttrain.models.task import Turns


def instruction_following_difficulty(
    lm: LanguageModel, prompts: Sequence[Turns], answers: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Perplexity of each answer after its prompt over that of the answer alone, float64 [N]; NaN beyond the context.

    Li et al., From Quantity to Quality, 2024 (arXiv:2308.12032), as the ratio of perplexities of the same authors'
    Superfiltering (2024, arXiv:2402.00530). The prompt is rendered by the model's chat template; the answer alone
    follows the token that begins a text, or ends one where there is none, so that both count the same tokens, the stop
    token included.
    """
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
