"""Rewords texts: by templates that the user writes, or by a model."""

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from posttrain.data.augment.method import AugmentMethod, Generators
from posttrain.data.generation.prompts import paraphrase_prompt, parse_json, parse_list
from posttrain.models.endpoint import Endpoint, EndpointConfig
from posttrain.models.reply_cache import Generate, ReplyCache

_SLOT = "{text}"


class Templates(AugmentMethod):
    """Puts the text into a template, such as ``Quick question: {text}``; templates are for a label, or for all."""

    method: Literal["templates"] = "templates"
    templates: tuple[str, ...] = Field((), description="Templates for every record; `{text}` stands for the text.")
    by_label: dict[str, tuple[str, ...]] = Field(
        {}, description="Templates for records with this answer, instead of those for every record."
    )

    @model_validator(mode="after")
    def _each_has_one_slot(self) -> Self:
        every = [*self.templates, *(template for templates in self.by_label.values() for template in templates)]
        if not every:
            raise ValueError("set `templates` or `by_label`")
        for template in every:
            if template.count(_SLOT) != 1:
                raise ValueError(f"the template `{template}` must hold {_SLOT} once")
        return self

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        variants: list[str | None] = []
        for text, label, rng in zip(texts, labels, rngs, strict=True):
            choice = self.by_label.get(label or "", self.templates)
            variants.append(choice[rng.integers(len(choice))].replace(_SLOT, text) if choice else None)
        return variants


class Paraphrase(AugmentMethod):
    """Paraphrases texts with a model; a reply in the wrong format makes no record.

    Replies are cached in a folder, so that it gives the same records again, without a second request.
    """

    method: Literal["paraphrase"] = "paraphrase"
    endpoint: EndpointConfig = Field(description="Server that writes the paraphrases.")
    replies: Path = Field(Path("paraphrases"), description="Folder that keeps every reply.")

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"replies": root / self.replies.expanduser()})

    def check(self) -> None:
        Endpoint(self.endpoint, ReplyCache(self.replies))

    def key(self) -> dict[str, Any]:
        # Only settings that a reply depends on: another key variable must not repeat finished shards.
        endpoint = {name: getattr(self.endpoint, name) for name in ("base_url", "model", "max_tokens")}
        return {"method": self.method, "copies": self.copies, "share": self.share, "endpoint": endpoint}

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        return (
            paraphrase_texts(texts, _cached_endpoint(self.endpoint, self.replies), self.copies, copy) if texts else []
        )


def paraphrase_texts(texts: list[str], generate: Generate, copies: int = 1, copy: int = 0) -> list[str | None]:
    """Paraphrases texts with any model; None where the reply has the wrong format.

    Args:
        generate: The model; equal texts make one request.
        copies: Paraphrases per request.
        copy: Index of the paraphrase to return.
    """
    # Each text once, in order of appearance: copies must not cost a second request.
    distinct = list(dict.fromkeys(texts))
    replies = generate([paraphrase_prompt(text, copies) for text in distinct])
    paraphrases: dict[str, str | None] = {}
    for text, reply in zip(distinct, replies, strict=True):
        # Models often ignore the requested format and number their lines.
        lines = parse_json(reply) or parse_list(reply) if reply is not None else None
        paraphrases[text] = lines[copy] if lines and copy < len(lines) else None
    return [paraphrases[text] for text in texts]


@lru_cache(maxsize=8)
def _cached_endpoint(config: EndpointConfig, folder: Path) -> Endpoint:
    return Endpoint(config, ReplyCache(folder), again=False)
