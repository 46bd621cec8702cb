"""The loss that a search raises, and its gradient at a prompt's embedded tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.models.likelihood import answer_log_likelihoods, label_scores
from posttrain.models.task import Turns


@dataclass(frozen=True)
class Objective:
    """-ln of the right answer's probability, in nats; with rivals, of its share among all choices.

    P(choice | prompt) is the product of its tokens' probabilities, stop token included, and the share is
    P(right) / sum of P(choice). A share moves only where the answer does, as it is told from the others; without
    rivals the loss would rise as well where all answers become less probable.

    Attributes:
        choices: the right answer, and then its rivals; all different.
    """

    lm: LanguageModel
    choices: list[str]

    def losses(self, prompts: Sequence[Turns]) -> npt.NDArray[np.float64]:
        """float64 [B], each prompt's loss, as the model is scored and served."""
        if len(self.choices) == 1:
            sums, _ = answer_log_likelihoods(self.lm, prompts, self.choices * len(prompts))
            loss: npt.NDArray[np.float64] = -sums
            return loss
        scores = label_scores(self.lm, prompts, self.choices, tolerance=0)
        return -scores.log_probabilities[:, 0].astype(np.float64)

    def gradient(self, prompt: Sequence[int]) -> tuple[float, Tensor]:
        """The loss of a prompt's tokens, and its gradient at their embeddings: float32 [T, D]."""
        with torch.no_grad():
            embedded = self.lm.model.get_input_embeddings()(torch.tensor([list(prompt)], device=self.lm.device))
        embedded.requires_grad_()
        loss = self.of_embedded(embedded)
        (found,) = torch.autograd.grad(loss, embedded)
        return float(loss.detach()), found[0].float()

    def of_embedded(self, prompt: Tensor) -> Tensor:
        """The loss, a float32 scalar, of embedded prompt tokens [1, T, D]."""
        answers = [self.lm.answer_ids(choice) for choice in self.choices]
        width, asked = max(map(len, answers)), prompt.shape[1]
        # What a causal model reads behind an answer does not reach back into it, so no mask is needed.
        filler = self.lm.tokenizer.pad_token_id or 0
        ids = torch.tensor([one + [filler] * (width - len(one)) for one in answers], device=self.lm.device)
        counts = torch.tensor([[at < len(one) for at in range(width)] for one in answers], device=self.lm.device)
        behind = self.lm.model.get_input_embeddings()(ids)
        rows = torch.cat([prompt.expand(len(answers), -1, -1), behind.to(prompt.dtype)], dim=1)
        hidden = self.lm.decoder(inputs_embeds=rows, use_cache=False).last_hidden_state
        logits = self.lm.logits(hidden[:, asked - 1 : asked - 1 + width])
        chosen = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        sums = (chosen * counts).sum(1)
        return -sums[0] if len(answers) == 1 else -sums.log_softmax(0)[0]
