"""The config section ``merge``: with which models a round's candidate is merged, and how."""

from typing import Any

from pydantic import Field, field_validator, model_validator

from posttrain.merge.methods.registry import METHODS, load_method
from posttrain.store.errors import UserError
from posttrain.store.message import counted
from posttrain.store.section import Section


class SearchConfig(Section):
    """The key ``search`` of a recipe: which numbers are searched, how, and the suites that score it."""

    suites: list[str] = Field(
        [], description="Files of suites or records, relative to the recipe; see docs/merging.md."
    )
    sampler: str | dict[str, Any] = Field(
        "gp", description="How the next numbers are chosen: a sampler of docs/tuning.md, by name or with its options."
    )
    trials: int = Field(30, ge=1, description="Merges that are measured, at most.")
    space: dict[str, tuple[float, float]] = Field(
        {}, description="Ranges of the options to search; empty: weights, and all options with two bounds."
    )


class MergeConfig(Section):
    """The section ``merge`` of a workspace's config."""

    models: list[str] = Field(
        [],
        description="Models that a trained candidate is merged with: `champion`, `base` (the model that training "
        "started from in round 0), `round 2`, or a model's id; empty: no merging.",
    )
    method: str = Field("linear", description="Merge method; see docs/merging.md.")
    weights: list[float] | None = Field(
        None, description="Weights of the candidate and of each of the models, in this order; null: the same for all."
    )
    parameters: dict[str, Any] = Field({}, description="Further options of the method, such as `density: 0.5`.")

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        return METHODS.check(value)

    @model_validator(mode="after")
    def _one_weight_a_model(self) -> "MergeConfig":
        if self.weights is not None and self.models and len(self.weights) != len(self.models) + 1:
            raise ValueError(
                f"{counted(len(self.weights), 'weight')} for the candidate and {counted(len(self.models), 'model')}"
            )
        return self

    def check(self) -> None:
        """Checks the options against the method, which imports it.

        Raises:
            UserError: the method has no such option, or cannot merge so many models.
        """
        if not self.models:
            return
        method = load_method(self.method, "merge.method")
        if method.result != "model":
            what = f"{self.method} makes no model like the candidate, which a round could deploy"
            raise UserError(what, where="merge.method", fix="run `posttrain merge` with it")
        for option in self.parameters:
            method.check_name(option, "merge.parameters")
        if self.weights is not None and "weight" not in method.options:
            raise UserError(f"{self.method} has no weights", where="merge.weights", fix="remove it")
        method.check_needs([*self.parameters, *([] if self.weights is None else ["weight"])], "merge.method")
        others = [model for model in self.models if not (method.task_vectors and model == "base")]
        method.check_models(1 + len(others))
