"""What the steps that score records under a language model share."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field

from posttrain.data.steps.sources import Precision, language_model, locate_model, model_key
from posttrain.data.steps.step import RowStep

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


class ModelStep(RowStep):
    """Reads records with a language model, which counts by its content and is loaded once a process."""

    model: str = Field(description="language model: a folder, a Hub id, a .gguf file, smollm2-135m or tiny")
    precision: Precision = Field("float32", description="of the model's weights: float32, bfloat16 or float16")

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"model": locate_model(self.model, root)})

    def check(self) -> None:
        locate_model(self.model, Path())

    def key(self) -> dict[str, Any]:
        return {**super().key(), "model": model_key(self.model)}

    def loaded(self) -> "LanguageModel":
        """The model.

        Raises:
            UserError: it is no causal language model.
        """
        return language_model(self.model, self.precision)
