"""Maps the name of each step to its class, which is imported on first use."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points

from posttrain.data.steps.step import Step
from posttrain.store.errors import UserError
from posttrain.store.extensions import load_object

ENTRY_POINTS = "posttrain.steps"
"""The group of entry points by which other packages add steps."""

_BUILT_IN = {
    "answers": "posttrain.data.steps.validity:Answers",
    "augment": "posttrain.data.augment.augment:Augment",
    "balance": "posttrain.data.steps.balance:Balance",
    "c4": "posttrain.data.steps.web_pages:C4",
    "conflicts": "posttrain.data.steps.duplicates:Conflicts",
    "decontaminate": "posttrain.data.contamination.decontaminate:Decontaminate",
    "difficulty": "posttrain.data.steps.model_scores:Difficulty",
    "drop": "posttrain.data.steps.drop:Drop",
    "exact": "posttrain.data.steps.duplicates:Exact",
    "fineweb": "posttrain.data.steps.web_pages:Fineweb",
    "gopher": "posttrain.data.steps.gopher:Gopher",
    "gopher_repetition": "posttrain.data.steps.gopher:GopherRepetition",
    "label_errors": "posttrain.data.steps.label_errors:LabelErrors",
    "language": "posttrain.data.steps.language:Language",
    "length": "posttrain.data.steps.validity:Length",
    "minhash": "posttrain.data.steps.duplicates:Minhash",
    "normalise": "posttrain.data.steps.normalise:Normalise",
    "perplexity": "posttrain.data.steps.model_scores:Perplexity",
    "pii": "posttrain.data.steps.pii:PersonalData",
    "quality": "posttrain.data.steps.quality:Quality",
    "schema": "posttrain.data.steps.validity:Schema",
    "semantic": "posttrain.data.steps.duplicates:Semantic",
    "substring": "posttrain.data.steps.substring:Substring",
    "toxicity": "posttrain.data.steps.toxicity:Toxicity",
}


class _Registry(Mapping[str, type[Step]]):
    """The built-in steps and those of entry points; ``package.module:Class`` loads any other step."""

    def __getitem__(self, name: str) -> type[Step]:
        """The class of a step.

        Raises:
            KeyError: no step has the name.
            UserError: its module cannot be imported, or holds no such step.
        """
        path = name if ":" in name else _paths().get(name)
        if path is None:
            raise KeyError(name)
        step = load_object(path, where=f"step {name}")
        if not (isinstance(step, type) and issubclass(step, Step)):
            fix = "derive it from RowStep or GlobalStep of posttrain.data.steps.step"
            raise UserError(f"`{path}` is no data step", where=f"step {name}", fix=fix)
        return step

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (":" in name or name in _paths())

    def __iter__(self) -> Iterator[str]:
        return iter(_paths())

    def __len__(self) -> int:
        return len(_paths())


STEPS = _Registry()


def config_name(step: Step) -> str:
    """The name by which `STEPS` finds the class again, also in another process that reads a recipe."""
    return step.name if step.name in STEPS else f"{type(step).__module__}:{type(step).__qualname__}"


@cache
def _paths() -> dict[str, str]:
    added = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    # A step of this package wins: finished versions were built with it under that name.
    return {**added, **_BUILT_IN}
