"""The data that the report shows; `posttrain.web.report_reader` reads it from a workspace."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.inspect.champion import RollbackReport
from posttrain.inspect.random_baseline import Comparison
from posttrain.loop.batch_counts import BatchCounts
from posttrain.loop.drift import drift_sentence
from posttrain.report.charts.lineage import LineageNode
from posttrain.report.formatting import is_share, level_text, metric_name, points_text
from posttrain.tune.transfer.past import PastStudy
from posttrain.web.selection_reader import Selection
from posttrain.web.training_reader import TrainingCurves


@dataclass(frozen=True)
class Champion:
    """The deployed model; ``round`` produced it."""

    id: str
    round: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class GainRow:
    """The candidate's gain over the champion in ``metric`` with its interval, in the metric's own unit.

    ``metric`` is the mean of the scores of ``n`` records, and need not be the report's main one: models that are
    judged by perplexity are compared by log likelihood. ``level`` is the interval's coverage, between 0 and 1.
    """

    difference: float
    low: float
    high: float
    n: int
    metric: str
    level: float


@dataclass(frozen=True)
class RuleRow:
    """A rule of the gate, as written and with its values filled in."""

    text: str
    values: str
    passed: bool


@dataclass(frozen=True)
class RoundRow:
    """A round. ``decision`` is baseline, deploy, refuse or rollback; None while it is open.

    ``champions`` is the main metric, as measured in their own rounds, of the models in use from this round's
    decision to the next one's: first the one that the decision left in service, then those put there by hand; None
    for a model that no round measured. ``seconds`` is by stage in the order of the stages; ``reasons`` counts why
    records were selected. ``labels`` counts the records of its training set, ``batch`` what became of those that it
    asked for. ``head`` says what a linear head reaches with the same labels, ``tuning`` what a search of the training's
    settings decided, ``retention`` what a merged candidate kept
    of the models that it is made of, a sentence for each model and suite. ``drift`` is that of its new inputs, with the
    fields of `posttrain.loop.drift.DriftValues`, or None.
    """

    number: int
    labels: int
    decision: str | None
    metrics: Mapping[str, float]
    champions: tuple[float | None, ...] = ()
    interval: GainRow | None = None
    rules: tuple[RuleRow, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    head: str = ""
    tuning: tuple[str, ...] = ()
    retention: tuple[str, ...] = ()
    batch: BatchCounts = field(default_factory=BatchCounts)
    drift: Mapping[str, float | None] | None = None

    @property
    def drift_text(self) -> str:
        """The drift in a sentence; "" where it was not measured."""
        return drift_sentence(self.drift) if self.drift else ""


@dataclass(frozen=True)
class ClassRow:
    """The champion's metrics on one label; ``n`` counts the records with that expected answer."""

    label: str
    n: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Confusion:
    """Counts answers ``predicted`` where ``expected`` was correct."""

    expected: str
    predicted: str
    count: int


@dataclass(frozen=True)
class FunnelRow:
    """Counts a set's records read, or rejected by one step for one reason.

    ``step`` is ``in`` for the records that came in and otherwise the step that rejected ``count`` of them for
    ``reason``. What is left is kept, so a row with the step ``kept`` is not needed.
    """

    set: str
    step: str
    reason: str
    count: int


@dataclass(frozen=True)
class DatasetRow:
    """A dataset version; ``parent`` is the id of the version before it."""

    name: str
    version: int
    id: str
    parent: str | None
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Report:
    """Everything on the page.

    Args:
        title: heading of the page.
        workspace: name of the workspace that the report was made for.
        task: the model's task, in a sentence.
        metric: the main metric, which every round's ``metrics`` holds once it is evaluated.
        final: metrics of the champion on the whole test split, where that was evaluated.
        baseline: comparison with random selection, if `run --baseline random` ran.
        selections: the rounds' batches, oldest first.
        trainings: the rounds' trainings, oldest first.
        searches: the rounds' searches of settings, oldest first.
        timings: anything else that was timed, in seconds, such as the time outside model compute.
        created: time of creation, as text.
        rollback: the roll-back that restored the champion, or None.
        head: what a linear head reaches with the labels of the last round that measured one, in a sentence, or why none
            was measured.
        canary: the canary that runs, or the last one, in a line.
        damage: a sentence for each thing that is damaged, and so missing from the page.
    """

    title: str
    workspace: str
    task: str
    champion: Champion | None
    rounds: tuple[RoundRow, ...]
    metric: str = "accuracy"
    label_counts: Mapping[str, int] = field(default_factory=dict)
    per_class: tuple[ClassRow, ...] = ()
    confusion: tuple[Confusion, ...] = ()
    funnel: tuple[FunnelRow, ...] = ()
    datasets: tuple[DatasetRow, ...] = ()
    lineage_nodes: tuple[LineageNode, ...] = ()
    lineage_edges: tuple[tuple[str, str], ...] = ()
    baseline: Comparison | None = None
    selections: tuple[Selection, ...] = ()
    trainings: tuple[TrainingCurves, ...] = ()
    searches: tuple[PastStudy, ...] = ()
    final: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    created: str = ""
    rollback: RollbackReport | None = None
    head: str = ""
    canary: str = ""
    damage: tuple[str, ...] = ()

    @property
    def rounds_done(self) -> int:
        """Number of finished rounds; round 0 only measures the base model and does not count."""
        return sum(row.number > 0 for row in self.rounds)

    @property
    def batches(self) -> BatchCounts:
        """The counts of all batches together."""
        return BatchCounts.total(row.batch for row in self.rounds)


def gain_text(gain: GainRow) -> str:
    """Formats a gain with its interval: points for shares, other metrics in their own unit."""
    share = is_share(gain.metric)
    difference, low, high = (
        points_text(value) if share else f"{value:+.3g}".replace("-", "−")
        for value in (gain.difference, gain.low, gain.high)
    )
    return (
        f"gain in {metric_name(gain.metric)} over the champion: {difference}{' points' if share else ''}"
        f" ({level_text(gain.level)} interval {low} to {high}, n = {gain.n:,})"
    )
