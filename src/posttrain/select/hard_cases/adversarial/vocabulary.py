"""The tokens that may take another's place."""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel


@dataclass(frozen=True)
class Vocabulary:
    """The V tokens of a model's embedding layer.

    Attributes:
        embeddings: float32 [V, D], what the layer gives for each.
        allowed: bool [V]: printable text, no special token.
        form: int64 [V]: whether the token begins with a space (2), and whether its text begins with a letter or digit
            (1), added up. A token only takes the place of one of its form, or words would fuse and fall apart.
    """

    embeddings: Tensor = field(repr=False)
    allowed: Tensor = field(repr=False)
    form: Tensor = field(repr=False)

    @classmethod
    @torch.no_grad()
    def of(cls, lm: LanguageModel) -> Self:
        """The vocabulary of a model."""
        layer = lm.model.get_input_embeddings()
        # Some layers scale what they look up, so they are asked instead of their weights.
        embeddings = layer(torch.arange(layer.weight.shape[0], device=lm.device)).float()
        size = min(len(lm.tokenizer), len(embeddings))
        special = {*lm.tokenizer.all_special_ids, *lm.tokenizer.added_tokens_decoder}
        texts = lm.tokenizer.batch_decode(
            [[token] for token in range(size)], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        pieces = lm.tokenizer.convert_ids_to_tokens(list(range(size)))
        allowed = torch.zeros(len(embeddings), dtype=torch.bool)
        form = torch.zeros(len(embeddings), dtype=torch.int64)
        for token, (text, piece) in enumerate(zip(texts, pieces, strict=True)):
            readable = bool(text.strip()) and text.isprintable() and "\ufffd" not in text
            allowed[token] = readable and token not in special
            spaced = text.startswith(" ") or str(piece).startswith("▁")  # SentencePiece's space
            form[token] = 2 * spaced + text.lstrip()[:1].isalnum()
        return cls(embeddings, allowed.to(lm.device), form.to(lm.device))

    def fits(self, own: Tensor) -> Tensor:
        """bool [T, V]: whether a token may take the place of each of ``own``, int64 [T]; none takes its own."""
        fit = self.allowed[None] & (self.form[None] == self.form[own][:, None])
        # Tokens that are no readable text, such as half of a character or a line's end, stay.
        fit = fit & self.allowed[own][:, None]
        fit[torch.arange(len(own), device=own.device), own] = False
        return fit
