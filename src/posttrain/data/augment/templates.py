"""Texts put into templates that the user writes."""

from typing import Literal, Self

from pydantic import Field, model_validator

from posttrain.data.augment.method import Generators, Method

_SLOT = "{text}"


class Templates(Method):
    """The text in the slot of a template, such as ``Quick question: {text}``; by label, or for all."""

    method: Literal["templates"] = "templates"
    templates: tuple[str, ...] = Field((), description="For every record; `{text}` is where the text goes.")
    by_label: dict[str, tuple[str, ...]] = Field({}, description="For records with this answer, instead.")

    @model_validator(mode="after")
    def _each_has_one_slot(self) -> Self:
        every = [*self.templates, *(one for templates in self.by_label.values() for one in templates)]
        if not every:
            raise ValueError("set `templates` or `by_label`")
        for template in every:
            if template.count(_SLOT) != 1:
                raise ValueError(f"the template `{template}` must hold {_SLOT} once")
        return self

    def texts(self, texts: list[str], labels: list[str | None], rngs: Generators, copy: int) -> list[str | None]:
        varied: list[str | None] = []
        for text, label, rng in zip(texts, labels, rngs, strict=True):
            choice = self.by_label.get(label or "", self.templates)
            varied.append(choice[rng.integers(len(choice))].replace(_SLOT, text) if choice else None)
        return varied
