"""Every step by the name that the config calls it."""

from posttrain.data.steps.answers import Answers
from posttrain.data.steps.conflicts import Conflicts
from posttrain.data.steps.exact import Exact
from posttrain.data.steps.step import Step

_ALL: tuple[type[Step], ...] = (Answers, Conflicts, Exact)

STEPS: dict[str, type[Step]] = {step.name: step for step in _ALL}
