"""Typing mistakes as augmentation."""

from typing import Literal

import numpy as np
from pydantic import Field

from posttrain.data.augment.method import Generators, Method
from posttrain.data.augment.typing_mistakes import add_typo


class Typos(Method):
    """Some words mistyped as on a keyboard; words with digits, addresses and short words stay."""

    method: Literal["typos"] = "typos"
    words: int = Field(1, ge=1, description="Words that are mistyped, one after the other.")

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        return [self._mistyped(text, rng) for text, rng in zip(texts, rngs, strict=True)]

    def _mistyped(self, text: str, rng: np.random.Generator) -> str:
        for _ in range(self.words):
            text = add_typo(text, rng, set())
        return text
