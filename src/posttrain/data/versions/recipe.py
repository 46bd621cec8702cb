"""What a dataset version is made of: files, steps and splits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, SerializeAsAny

from posttrain.data.split import SplitsConfig
from posttrain.data.split.split_step import Split
from posttrain.data.steps.registry import STEPS, config_name
from posttrain.data.steps.step import GlobalStep, RowStep, Step
from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Files = Annotated[list[str], BeforeValidator(_as_list)]
"""Files, globs, folders and URLs; one may stand without a list."""


def parse_step(value: Any) -> Step:
    """A step from its name, or from ``{name: settings}``."""
    if isinstance(value, Step):
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
        raise ValueError(str(error)) from None


def _steps(value: Any) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("is a list of steps")
    steps = [parse_step(one) for one in value]
    behind = next((step.name for step in steps if step.training_only), None)
    for step in steps[next((place for place, step in enumerate(steps) if step.training_only), len(steps)) :]:
        if not step.training_only:
            raise ValueError(f"`{step.name}` cannot follow `{behind}`, which meets the training records alone")
    return steps


def step_values(step: Step) -> dict[str, Any]:
    """The step as the config writes it."""
    return {config_name(step): step.model_dump(mode="json")}


StepField = Annotated[SerializeAsAny[Step], PlainSerializer(step_values)]
Steps = Annotated[list[StepField], BeforeValidator(_steps)]
"""Steps in the order in which records go through them; those for training records alone come last."""


class Suite(Section):
    """Evaluation records that training records must not give away."""

    file: str = Field(description="The file, named from the workspace's folder, or a dataset version.")
    columns: dict[str, str] | None = Field(None, description="Which column holds what; null: as in the recipe.")


class Recipe(Section):
    """Everything that a version's records depend on, besides the content of the files."""

    columns: dict[str, str] | None = Field(None, description="Which column holds what.")
    labels: list[str] = Field([], description="The closed label set; empty: answers are open-ended.")
    steps: Steps = Field([], description="What the records go through.")
    splits: SplitsConfig | None = Field(None, description="What is held out, and how; null: nothing.")

    def located(self, root: Path) -> "Recipe":
        """The recipe with the steps' files named from ``root``."""
        return self.model_copy(update={"steps": [step.located(root) for step in self.steps]})

    @property
    def chain(self) -> list[Step]:
        """All steps with the split, where there is one, before those for training records alone."""
        split = [Split(settings=self.splits)] if self.splits else []
        return [*self.steps[: self.boundary], *split, *self.steps[self.boundary :]]

    @property
    def boundary(self) -> int:
        """How many steps meet all records."""
        return next((place for place, step in enumerate(self.steps) if step.training_only), len(self.steps))

    def keys(self) -> dict[str, Any]:
        """What tells the outcome apart from that of other recipes, as JSON values."""
        return {
            "columns": self.columns,
            "labels": self.labels,
            "steps": [step.key() for step in self.steps],
            "splits": self.splits.model_dump(mode="json") if self.splits else None,
        }


def applicable_steps(steps: Sequence[Step], labels: Sequence[str]) -> list[Step]:
    """The steps that mean something with these labels; an empty set is of open-ended answers."""
    return [step for step in steps if labels or not step.needs_labels]


def row_steps(steps: Sequence[Step], start: int) -> tuple[RowStep, ...]:
    """The row steps from ``start`` up to the next global one."""
    found: list[RowStep] = []
    for step in steps[start:]:
        if not isinstance(step, RowStep):
            break
        found.append(step)
    return tuple(found)


def global_steps(steps: Sequence[Step], start: int) -> tuple[tuple[int, GlobalStep], ...]:
    """The global steps from ``start`` up to the next row step, each with its place."""
    found: list[tuple[int, GlobalStep]] = []
    for place, step in enumerate(steps[start:], start):
        if not isinstance(step, GlobalStep):
            break
        found.append((place, step))
    return tuple(found)
