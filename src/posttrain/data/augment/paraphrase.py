"""Texts in other words, by a model."""

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from posttrain.data.augment.method import Generators, Method
from posttrain.data.synthesis.config import EndpointConfig
from posttrain.data.synthesis.endpoint import Endpoint
from posttrain.data.synthesis.prompts import listed, paraphrases, parse
from posttrain.data.synthesis.replies import Generate, Replies


class Paraphrase(Method):
    """Texts as a model says them in other words; a reply that is not as asked makes no record.

    Replies are kept, so that the same records come out of the same folder, and nothing is asked twice.
    """

    method: Literal["paraphrase"] = "paraphrase"
    endpoint: EndpointConfig = Field(description="The server that is asked.")
    replies: Path = Field(Path("paraphrases"), description="The folder that keeps every reply.")

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"replies": root / self.replies.expanduser()})

    def check(self) -> None:
        Endpoint(self.endpoint, Replies(self.replies))

    def key(self) -> dict[str, Any]:
        asked = {name: getattr(self.endpoint, name) for name in ("base_url", "model", "temperature", "max_tokens")}
        return {"method": self.method, "copies": self.copies, "share": self.share, "endpoint": asked}

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        return paraphrased(texts, _endpoint(self.endpoint, self.replies), self.copies, copy) if texts else []


def paraphrased(texts: list[str], generate: Generate, copies: int = 1, copy: int = 0) -> list[str | None]:
    """A paraphrase a text by any model; None where the reply is not as asked.

    Args:
        generate: equal texts are asked for once.
        copies: how many are asked for in one request.
        copy: which of them is taken.
    """
    distinct = list(dict.fromkeys(texts))
    replies = generate([paraphrases(text, copies) for text in distinct])
    found: dict[str, str | None] = {}
    for text, reply in zip(distinct, replies, strict=True):
        written = parse(reply) or listed(reply) if reply is not None else None
        found[text] = written[copy] if written and copy < len(written) else None
    return [found[text] for text in texts]


@lru_cache(maxsize=8)
def _endpoint(config: EndpointConfig, folder: Path) -> Endpoint:
    return Endpoint(config, Replies(folder), anew=False)
