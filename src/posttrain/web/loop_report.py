"""The report on a workspace: the sections that the server's pages show, and all of them as a page that is a file.

What a stage did it says itself, in `RoundStep.report` and `RoundStep.sections`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.inspect.champion import MEND
from posttrain.inspect.random_baseline import Comparison, compare_with_random
from posttrain.inspect.status import model_seconds, status
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import Progress
from posttrain.loop.canary import describe_canary
from posttrain.loop.config import Config
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.record import LoopRecord, RoundRecord, StageReport, read_rounds
from posttrain.loop.round import known_steps, stage_reports
from posttrain.loop.stages.decide import DecidedGain, decided_gain
from posttrain.report.charts.bars import format_seconds, stacked_bars
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.rounds import CurvePoint, learning_curve_chart
from posttrain.report.formatting import is_share, level_text, metric_name, metric_text, points_text
from posttrain.report.section import Block, Cell, Fold, Page, Pairs, Section, Table, Text, Tile, blocks
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.message import Message
from posttrain.store.rows import Deployment
from posttrain.store.workspace import Workspace
from posttrain.web.lineage import lineage_section
from posttrain.web.page import write_page

log = logging.getLogger("posttrain")

_PREFERRED = ("mean_absolute_error", "micro_f1", "macro_f1", "invalid_rate", "latency_p50", "latency_p99")
"""Metrics in the table of rounds besides the main one, where they are measured."""


@dataclass(frozen=True)
class LoopReport:
    """A loop as its pages show it.

    Attributes:
        config: The config.
        record: The recorded rounds.
        state: What `posttrain status --json` prints.
        metric: Name of the main metric.
        pending: The batches that people answer now, which no finished round counts.
    """

    config: Config
    record: LoopRecord
    state: Mapping[str, Any]
    metric: str
    pending: Sequence[Progress] = ()

    @property
    def rounds(self) -> list[RoundRecord]:
        """The finished rounds."""
        return self.record.done

    @property
    def measured(self) -> list[RoundRecord]:
        """The finished rounds that have the main metric."""
        return [record for record in self.rounds if self.metric in _metrics(record)]

    @property
    def status_rounds(self) -> list[Mapping[str, Any]]:
        """The entries of the finished rounds in `state`."""
        return [entry for entry in self.state["rounds"] if entry["status"] == "done"]

    @property
    def reports(self) -> Mapping[int, Mapping[str, StageReport]]:
        """What each stage reports of each finished round, by its number."""
        return {record.number: stage_reports(self.config, record) for record in self.rounds}

    @property
    def damage(self) -> Message | str:
        """Says what is damaged in the champion's files; "" if nothing is."""
        champion = self.state["champion"]
        if not champion or not champion["damage"]:
            return ""
        return Message("The champion is damaged: {damage}; {mend}.", damage="; ".join(champion["damage"]), mend=MEND)

    @property
    def rollback(self) -> str:
        """Says who rolled back to the champion; "" if it was put in service otherwise."""
        return self.state["rollback"]["sentence"] if self.state["rollback"] else ""


def read_loop(workspace: Workspace, config: Config, detail: float = 1.0) -> LoopReport:
    """Reads a loop.

    Args:
        workspace: The workspace.
        config: Its config.
        detail: Share of the points and rows that a page has room for.
    """
    record, state = read_rounds(workspace, detail), status(workspace, config)
    # A round's row has the main suite's metric first; the champion's, as the config may have changed since.
    measured = [_metrics(each) for each in record.done if _metrics(each)]
    of_champion = state["champion"]["metrics"] if state["champion"] else {}
    metric = next(iter(of_champion or (measured[-1] if measured else {})), "accuracy")
    queue = Queue(workspace.metadata, config.label.queue)
    pending = [queue.progress(batch.name) for batch in queue.batches("open") if batch.round is not None]
    return LoopReport(config, record, state, metric, pending)


def report_page(workspace: Workspace, config: Config, detail: float = 1.0) -> Page:
    """Returns the page with all sections."""
    loop = read_loop(workspace, config, detail)
    done = sum(record.number > 0 for record in loop.rounds)
    heading = f"{workspace.root.name}: {done} round{'' if done == 1 else 's'}"
    heading += ", rolled back" if loop.state["rollback"] else ""
    sections = [
        curve_section(loop, _comparison(workspace, config)),
        decisions_section(loop),
        *(section for step in known_steps(config) for section in step.sections(loop.record)),
        lineage_section(workspace),
        time_section(loop),
    ]
    champion = loop.state["champion"]
    about = f"Champion `{champion['id']}`." if champion else ""
    return Page(heading, workspace.root.name, task_sentence(config), headline(loop), sections, about)


def write_report(path: Path, workspace: Workspace, config: Config) -> None:
    """Writes the page atomically to ``path``, whose folder exists.

    Raises:
        UserError: the disk refused.
    """
    write_page(path, partial(report_page, workspace, config))


def task_sentence(config: Config) -> str:
    """Returns the model's task in a sentence."""
    instruction, labels = config.task.system or "Answer the prompt.", config.task.label_set
    return f"{instruction} {Message('{count} labels are allowed.', count=len(labels))}" if labels else instruction


def headline(loop: LoopReport) -> list[Tile]:
    """Returns the headline numbers."""
    tiles: list[Tile] = []
    champion, measured = loop.state["champion"], loop.measured
    if champion and loop.metric in champion["metrics"]:
        now = champion["metrics"][loop.metric]
        name = Message("{metric} of the champion", metric=metric_name(loop.metric))
        tiles.append((metric_text(loop.metric, now), name, Message("of the model of round {round}", **champion)))
        # A gain in points means something for shares alone: a perplexity falls.
        if measured and is_share(loop.metric, now):
            first = _metrics(measured[0])[loop.metric]
            since = Message("since {start}", start=metric_text(loop.metric, first))
            tiles.append((points_text(now - first), Message("points gained"), since))
    done, wanted = sum(record.number > 0 for record in loop.rounds), loop.state["rounds_wanted"]
    tiles.append((str(done) if wanted is None else f"{done} / {wanted}", Message("rounds done"), ""))
    counts = [entry["batch"] for entry in loop.status_rounds if entry["batch"]]
    answered = sum(each["answered"] for each in counts) + sum(each.done for each in loop.pending)
    asked = sum(each["asked"] for each in counts) + sum(each.items for each in loop.pending)
    tiles.append((f"{answered:,}", Message("labels answered"), Message("of {count} asked", count=f"{asked:,}")))
    actions = [record.state.action for record in loop.rounds]
    remarks = [Message("and {count} refused", count=actions.count("refuse"))]
    if back := actions.count("rollback"):
        remarks.append(Message("{count} rolled back", count=back))
    tiles.append((str(actions.count("deploy")), Message("models deployed"), Message.joined(", ", remarks)))
    spent = sum(sum(entry["stages"].values()) for entry in loop.status_rounds)
    tiles.append((format_seconds(spent), Message("time"), Message("all stages together")))
    return tiles


def curve_section(loop: LoopReport, baseline: Comparison | None = None) -> Section:
    """Shows the learning curve, and the champion on all test records."""
    alerts = blocks(Text(loop.rollback, "alert"), Text(loop.damage, "alert"))
    chart = learning_curve(loop, baseline)
    if chart is None:
        return Section(Message("Learning curve"), alerts, Message("No round has been evaluated yet."))
    captions = [_CURVE]
    gains = [gain for record in loop.measured if (gain := _main_gain(loop, record))]
    if levels := " or ".join(level_text(level) for level in sorted({gain.level for gain in gains})):
        captions.append(Message(_BARS, levels=levels))
    final = loop.state["final"]["metrics"] if loop.state["final"] else {}
    against = Message("Against drawing at random: {conclusion}", conclusion=baseline.conclusion) if baseline else ""
    return Section(
        Message("Learning curve"),
        blocks(
            alerts,
            Text(Message.joined(" ", captions), "caption"),
            chart,
            Text(against),
            Text(Message("The champion on the whole test split") if final else "", "heading"),
            Pairs([(metric_name(name), metric_text(name, value)) for name, value in final.items()]),
        ),
    )


_CURVE = Message(
    "Each mark is the candidate of a round, evaluated on the same held-out records. The broad line is the champion: it "
    "moves when the gate deploys a candidate or rolls back, and between rounds when someone promotes a model or rolls "
    "back by hand."
)
_BARS = (
    "Upright bars are the {levels} paired interval of the gain, drawn around the champion that the candidate "
    "had to beat: a bar entirely above that champion shows a significant gain."
)


def learning_curve(loop: LoopReport, baseline: Comparison | None = None) -> Chart | None:
    """Draws the learning curve; None while no round is evaluated."""
    values = {record.number: _metrics(record)[loop.metric] for record in loop.measured}
    # Both curves must be in the same metric, which may differ after the main suite changes.
    compared = baseline if baseline and baseline.metric == loop.metric else None
    random_values = {point.round: point.value for point in compared.random} if compared else {}
    champions = champion_metrics(loop)
    points = []
    for record in loop.measured:
        gain, main = decided_gain(record), _main_gain(loop, record)
        # By the paired difference, which is over the same records for both models.
        beaten = values[record.number] - main.difference if main else 0.0
        points.append(
            CurvePoint(
                name=Message("round {number}", number=record.number),
                detail=Message("{count} labels", count=f"{record.state.labels or 0:,}"),
                value=values[record.number],
                champions=champions[record.number],
                decision=record.state.action or "open",
                gain=gain.text if gain else "",
                bar=(beaten + main.low, beaten + main.high) if main else None,
                random_baseline=random_values.get(record.number),
            )
        )
    percent = all(is_share(loop.metric, value) for value in values.values())
    name = metric_name(loop.metric)
    title = Message("{metric} of each round's candidate and of the champion", metric=name)
    return learning_curve_chart(points, title, measure=name, percent=percent)


def _main_gain(loop: LoopReport, record: RoundRecord) -> DecidedGain | None:
    gain = decided_gain(record)
    return gain if gain and gain.metric == loop.metric else None


def champion_metrics(loop: LoopReport) -> dict[int, tuple[float | None, ...]]:
    """Returns by round the main metric of the models in use from its decision to the next one's.

    As their own rounds measured it: first that of the model that the decision left in service, then those of models put
    there by hand; None for a model that no round measured.
    """
    values = {record.state.candidate: _metrics(record).get(loop.metric) for record in loop.rounds}
    deployed: dict[int, list[Deployment]] = {}
    number = 0
    for row in loop.record.workspace.metadata.deployments():
        # A deployment by hand has no round: it belongs to the last one that was finished then.
        finished = [
            each.number for each in loop.rounds if each.row.finished_at and each.row.finished_at <= row.created_at
        ]
        number = row.round if row.round is not None else max(number, *finished, 0)
        deployed.setdefault(number, []).append(row)
    metrics, in_use = {}, list[str]()
    for record in loop.rounds:
        rows = deployed.get(record.number, [])
        # The row of the decision comes first; without one, the model of before stays in use until one by hand.
        decided = rows[0].round is not None if rows else False
        in_use = ([] if decided else in_use[-1:]) + [row.model_id for row in rows]
        metrics[record.number] = tuple(values.get(model) for model in in_use)
    return metrics


def decisions_section(loop: LoopReport) -> Section:
    """Lists the finished rounds, the latest first, with what each stage reports of them."""
    names = table_metrics(loop)
    rows: list[tuple[str | Cell, ...]] = []
    for record, entry in zip(loop.rounds, loop.status_rounds, strict=True):
        counts, metrics = entry["batch"] or {"asked": 0, "used": 0}, _metrics(record)
        rows.append(
            (
                str(record.number),
                Cell(chip=record.state.action or "open"),
                *(f"{counts[name]:,}" for name in ("asked", "used")),
                f"{record.state.labels or 0:,}",
                *(metric_text(name, metrics[name]) if name in metrics else "–" for name in names),
                format_seconds(sum(entry["stages"].values())),
            )
        )
    columns = [Message("round"), Message("decision"), Message("asked"), Message("used"), Message("labels")]
    table = Table([*columns, *map(metric_name, names), Message("time")], rows[::-1], Message("All rounds"))
    reports = loop.reports
    folds = [_round_fold(record, reports[record.number]) for record in reversed(loop.rounds)]
    canary = ModelRegistry(loop.record.workspace).last_canary
    shown = blocks(
        Text(Message("Canary: {line}", line=describe_canary(canary)), "sentence") if canary else None,
        Text(_DECISIONS, "caption"),
        table,
        (fold for fold in folds if fold.blocks),
    )
    return Section(Message("Decisions"), shown if rows else [], Message("No round has run yet."))


_DECISIONS = Message(
    "One row per round: the records it asked for, the labels used of these, all labels in its training set, its "
    "metrics, and the gate's decision. Round 0 measures the base model and is not counted. Open a round below for what "
    "its stages did, and for the rules with their values."
)


def _round_fold(record: RoundRecord, reports: Mapping[str, StageReport]) -> Fold:
    shown: list[Block] = []
    for report in reports.values():
        shown += blocks((Text(line, "sentence") for line in (*report.lines, *report.latest)), report.blocks)
    action = record.state.action or "open"
    return Fold(
        Message("round {number}", number=record.number),
        shown,
        remark=next((report.remark for report in reports.values() if report.remark), ""),
        chip=action,
        is_open=action in ("refuse", "rollback"),
        id=f"round-{record.number}",
    )


def table_metrics(loop: LoopReport) -> list[str]:
    """Returns the metrics in the table of rounds: the main one and up to three more."""
    names = dict.fromkeys(name for record in loop.rounds for name in _metrics(record))
    others = [name for name in names if name not in _PREFERRED and "." not in name]
    return (
        list(dict.fromkeys([loop.metric, *(name for name in _PREFERRED if name in names), *others]))[:4]
        if names
        else []
    )


def time_section(loop: LoopReport) -> Section:
    """Shows the time of each stage in each round, and what part of it models computed."""
    entries = [entry for entry in loop.status_rounds if entry["stages"]]
    # The round with most stages fixes their order; round 0 has only a few of them.
    fullest_first = sorted(entries, key=lambda entry: -len(entry["stages"]))
    stages = list(dict.fromkeys(stage for entry in fullest_first for stage in entry["stages"]))
    titles = {step.name: step.title or step.name for step in known_steps(loop.config)}
    rows = [
        (
            Message("round {number}", number=entry["round"]),
            {titles.get(name, name): seconds for name, seconds in entry["stages"].items()},
        )
        for entry in entries
    ]
    names = [titles.get(name, name) for name in stages]
    chart = stacked_bars(rows, names, Message("time by stage in each round"))
    total = sum(entry["seconds"] or 0.0 for entry in loop.status_rounds)
    computing = sum(model_seconds(loop.record.workspace, entry["round"]) for entry in loop.status_rounds)
    timings = [
        (Message("all rounds"), format_seconds(total)),
        (Message("model compute"), format_seconds(computing)),
        (Message("everything else"), format_seconds(total - computing)),
    ]
    caption = Message("Time of each stage in each round; the length of a bar is the round's total.")
    shown = (chart, Pairs(timings)) if chart else None
    return Section.of(Message("Time"), caption, shown, empty=Message("No stage has run yet."))


def _comparison(workspace: Workspace, config: Config) -> Comparison | None:
    try:
        return compare_with_random(workspace, config)
    # A report must be possible for a workspace that has lost something.
    except DamagedArtifactError as error:
        log.warning("%s; the comparison with random choice is left out", error)
        return None


def _metrics(record: RoundRecord) -> Mapping[str, float]:
    return record.state.metrics or {}
