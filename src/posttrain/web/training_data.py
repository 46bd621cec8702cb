"""What the report shows of one training, gathered by the caller; nothing here reads a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.web.charts.thin import Numbers


@dataclass(frozen=True)
class TrainingDecision:
    """What the watch found at a step, and what was done about it; ``why`` where it was not the configured action.

    ``kind`` and ``action`` are the watch's own words, such as ``no_supervised`` and ``lower_rate``.
    """

    step: int
    kind: str
    what: str
    action: str
    why: str = ""


@dataclass(frozen=True)
class Training:
    """One training, step by step.

    Args:
        name: of the round, or of the folder.
        steps: float64 [N], rising.
        values: float64 [N] each, by the name that the metrics file gives them; NaN where nothing was measured.
        groups: gradient norms by layer group, from the first layer to the last; likewise.
        objective: what the objective measured besides; likewise.
        phases: seconds of the whole training by phase, in words.
        decisions: oldest first.
        settings: what decided it, by name, in words.
    """

    name: str
    steps: Numbers
    values: Mapping[str, Numbers]
    groups: Mapping[str, Numbers] = field(default_factory=dict)
    objective: Mapping[str, Numbers] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    decisions: tuple[TrainingDecision, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
