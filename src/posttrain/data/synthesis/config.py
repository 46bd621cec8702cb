"""Defines the settings of a synthesis."""

from typing import Literal, Self

from pydantic import Field, model_validator

from posttrain.data.generation.prompts import Form
from posttrain.models.endpoint import EndpointConfig
from posttrain.store.section import Section

Method = Literal["instructions", "label_inputs", "paraphrases"]


class SynthesisConfig(Section):
    """The config of a synthesis."""

    method: Method = Field(
        "instructions",
        description="instructions: new prompts like the seeds', then their answers; label_inputs: new inputs of each "
        "label; paraphrases: the seeds' inputs in other words, with the seeds' answers.",
    )
    records: int = Field(100, ge=1, description="Number of new records.")
    examples: int = Field(8, ge=1, description="Seeds that a request shows; 8 in the paper.")
    per_request: int = Field(4, ge=1, description="Items requested at a time.")
    form: Form = Field(
        "json",
        description="Requested format: a JSON array, or numbered lines, which small models manage. "
        "Either is read, whatever the request says.",
    )
    max_requests: int | None = Field(None, ge=1, description="Requests at most; four times those needed by default.")
    similarity: float = Field(
        0.7,
        gt=0,
        le=1,
        description="ROUGE-L from which an item is too like an earlier one or a seed (0.7: paper).",
    )
    min_words: int = Field(3, ge=0, description="Fewest words of a new instruction.")
    max_words: int = Field(150, ge=1, description="Most words of a new instruction.")
    unwanted_words: tuple[str, ...] = Field(
        ("image", "images", "picture", "pictures", "graph", "graphs"),
        description="Words of instructions that no text can answer; an item with one of them is rejected.",
    )
    system: str | None = Field(None, description="The system turn before an instruction that is to be answered.")
    seed: int = Field(0, ge=0, description="Of the choice of examples.")
    temperature: float = Field(0.7, ge=0, description="Sampling temperature of the server.")
    endpoint: EndpointConfig | None = Field(None, description="The server; null for a local model.")

    @model_validator(mode="after")
    def _lengths_leave_room(self) -> Self:
        if self.min_words > self.max_words:
            raise ValueError("`min_words` is greater than `max_words`")
        return self

    @property
    def most_requests(self) -> int:
        return self.max_requests or 4 * -(-self.records // self.per_request)
