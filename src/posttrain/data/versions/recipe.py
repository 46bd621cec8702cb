"""Defines what decides a dataset version besides its files: columns, labels, steps and splits."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, SerializeAsAny

from posttrain.data.split import FrozenSplits
from posttrain.data.split.split_step import Split
from posttrain.data.steps.registry import BUILT_IN, STEPS
from posttrain.data.steps.step import DataStep, GlobalStep, RowStep
from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section


def parse_step(value: Any) -> DataStep:
    """Reads a step from its name, or from ``{name: settings}``."""
    if isinstance(value, DataStep):
        return value
    name: Any = value
    settings: Any = {}
    if isinstance(value, Mapping) and len(value) == 1:
        name, settings = next(iter(value.items()))
    if not isinstance(name, str):
        raise ValueError("a step is a name, or a name with its settings, such as `minhash: {threshold: 0.8}`")
    if name not in STEPS:
        raise ValueError(f"there is no step `{name}`; {suggest(name, STEPS)}")
    if not isinstance(settings, Mapping | None):
        raise ValueError(f"the settings of `{name}` are a mapping, such as `{name}: {{threshold: 0.8}}`")
    try:
        return STEPS[name].read(settings or {}, name)
    except UserError as error:
        # pydantic reports a ValueError with the key in the config; a UserError would hide it.
        raise ValueError(str(error)) from None


def _steps(value: Any) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("is a list of steps")
    steps = [*default_steps()] if value == DEFAULT_STEPS else [parse_step(item) for item in value]
    # After the split held-out records take no further step, so a step for all records cannot follow.
    first = next((index for index, step in enumerate(steps) if step.training_only), len(steps))
    for step in steps[first:]:
        if not step.training_only:
            raise ValueError(f"`{step.name}` cannot follow `{steps[first].name}`, which sees only training records")
    return steps


def config_name(step: DataStep) -> str:
    """Returns the name by which `STEPS` finds the class again, also in another process that reads a recipe."""
    reference = f"{type(step).__module__}:{type(step).__qualname__}"
    # Built-in steps first: the registry would load the entry points of all installed packages.
    if BUILT_IN.get(step.name) == reference or (step.name in STEPS and STEPS[step.name] is type(step)):
        return step.name
    return reference


def step_values(step: DataStep) -> dict[str, Any]:
    """Returns the step as the config writes it."""
    return {config_name(step): step.model_dump(mode="json")}


StepField = Annotated[SerializeAsAny[DataStep], PlainSerializer(step_values)]
Steps = Annotated[list[StepField], BeforeValidator(_steps)]
"""Steps in the order in which they run; those for training records only come last."""


DEFAULT_STEPS: Any = [
    "exact",
    "conflicts",
    {"minhash": {"threshold": 0.9}},
    {"decontaminate": {"threshold": 0.9}},
]
"""Steps that run if the config names none."""


@cache
def default_steps() -> tuple[DataStep, ...]:
    """Parses `DEFAULT_STEPS`, once: steps are frozen, so all configs share them."""
    return tuple(parse_step(item) for item in DEFAULT_STEPS)


class Suite(Section):
    """Names evaluation records that training records must not overlap with."""

    file: str = Field(description="The file, named from the workspace's folder, or a dataset version.")
    columns: dict[str, str] | None = Field(None, description="Columns of the file; null: those of the recipe.")


class Recipe(Section):
    """Everything that decides a version's records, besides the content of the files."""

    columns: dict[str, str] | None = Field(None, description="Columns of the files.")
    labels: list[str] = Field([], description="Closed label set; empty: answers are open-ended.")
    steps: Steps = Field([], description="Steps that the records go through.")
    splits: FrozenSplits | None = Field(None, description="Held-out splits; null: none.")
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="Stop at a record that cannot be read, or leave it out and keep its reason."
    )

    def located(self, root: Path) -> "Recipe":
        """Copies the recipe with the steps' files resolved against ``root``."""
        return self.model_copy(update={"steps": [step.located(root) for step in self.steps]})

    @property
    def chain(self) -> list[DataStep]:
        """All steps, with the split, if any, before those for training records only."""
        split = [Split(settings=self.splits)] if self.splits else []
        return [*self.steps[: self.boundary], *split, *self.steps[self.boundary :]]

    @property
    def boundary(self) -> int:
        """Number of steps that see all records."""
        return next((index for index, step in enumerate(self.steps) if step.training_only), len(self.steps))

    def keys(self) -> dict[str, Any]:
        """Returns JSON values that identify the recipe: equal keys give equal records."""
        return {
            "columns": self.columns,
            "labels": self.labels,
            "steps": [step.key() for step in self.steps],
            "splits": self.splits.model_dump(mode="json") if self.splits else None,
            "on_error": self.on_error,
        }


def applicable_steps(steps: Sequence[DataStep], labels: Sequence[str]) -> list[DataStep]:
    """Drops steps that need labels if there are none; an empty label set means open-ended answers."""
    return [step for step in steps if labels or not step.needs_labels]


def row_steps(steps: Sequence[DataStep], start: int) -> tuple[RowStep, ...]:
    """Returns the row steps from ``start`` up to the next global one."""
    result: list[RowStep] = []
    for step in steps[start:]:
        if not isinstance(step, RowStep):
            break
        result.append(step)
    return tuple(result)


def global_steps(steps: Sequence[DataStep], start: int) -> tuple[tuple[int, GlobalStep], ...]:
    """Returns the global steps from ``start`` up to the next row step, each with its index."""
    result: list[tuple[int, GlobalStep]] = []
    for index, step in enumerate(steps[start:], start):
        if not isinstance(step, GlobalStep):
            break
        result.append((index, step))
    return tuple(result)
