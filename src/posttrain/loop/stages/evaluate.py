"""Evaluate: measures models on the suites, and times candidate and champion side by side."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.evaluate.latency import answer_function, measure_latency
from posttrain.evaluate.metric_names import flat_metrics
from posttrain.evaluate.retention import merge_retention, retention_sentences
from posttrain.evaluate.scorers.base import sample_records
from posttrain.evaluate.suite import SuiteResult, read_evaluation, run_suite, write_evaluation
from posttrain.loop.context import RoundContext, model_key
from posttrain.loop.ensembles import load_model
from posttrain.loop.linear_head import head_report, measure_head
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.record import LoopRecord, RoundRecord, StageReport
from posttrain.loop.stage import CachedWork, Stage
from posttrain.loop.state import RoundState
from posttrain.loop.suites import function_digests, suite_digests, suite_records
from posttrain.models.task import record_turns
from posttrain.report.charts.bars import bars
from posttrain.report.charts.heat_map import heat_map
from posttrain.report.section import Fold, Section, Table, Text
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.message import Message

log = logging.getLogger("posttrain")

LATENCY = "latency.json"

_HEADLINES = (
    *("accuracy", "record_f1", "micro_f1", "macro_f1", "mean_absolute_error", "token_f1", "score"),
    *("preference_accuracy", "perplexity", "invalid_rate", "latency_p99"),
)


@dataclass(frozen=True)
class Evaluate(Stage):
    """Scores one model on every suite.

    Args:
        model: Id of the model, or of an ensemble.
        test: Id of the test set.
        full: True for all records where a suite names a sample.
    """

    model: str
    test: str
    full: bool = False
    name = "evaluate"
    title = Message("evaluate")
    kind = "evaluation"
    version = 2
    seeded = False

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Evaluates the champion, the candidate and the base model, and times the first two.

        In round 0 all three are the base model, which is measured once.
        """
        state = context.state
        base, test = state.id("base"), state.id("test")
        champion, candidate = state.champion or base, state.candidate or base
        # One stage a model: the champion's and the base model's evaluations of earlier rounds are found, not repeated.
        evaluation_of = {model: context.run(cls(model, test)).id for model in (champion, candidate, base)}
        latency = measure_latencies(context, candidate, champion, test)
        metrics = metrics_of(context, evaluation_of[candidate], latency, "candidate")
        log.info("  %s%s", "candidate " if context.number else "", format_metrics(metrics))
        context = replace(context, state=measure_head(context))
        retention = cls._retention(context, evaluation_of[candidate])
        state = context.update(
            evaluation=evaluation_of[candidate],
            champion_evaluation=evaluation_of[champion] if context.number else None,
            base_evaluation=evaluation_of[base],
            latency=latency,
            metrics=metrics,
        )
        return state.with_result(cls.name, retention) if retention else state.without(cls.name)

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports other test records than the round before had, a linear head, and what a merged candidate kept."""
        retention = record.state.results.get(cls.name) or []
        head, sentence = head_report(record)
        values = {"test": record.state.test, "retention": retention, "head": head and {**head, "sentence": sentence}}
        lines = [*_other_records(record), *retention_sentences(retention)]
        return StageReport(values, lines, [sentence] if sentence else ())

    @classmethod
    def sections(cls, loop: LoopRecord) -> Iterator[Section]:
        """Yields the champion's results by class and its confusions, as its own round measured them."""
        champion = ModelRegistry(loop.workspace).champion
        id = next(
            (
                each.state.evaluation
                for each in loop.done[::-1]
                if champion and each.state.candidate == champion.model_id
            ),
            None,
        )
        try:
            main = next(iter(read_evaluation(loop.workspace.artifacts.path(id)).values())) if id else None
        except DamagedArtifactError as error:
            log.warning("%s; its classes and confusions are left out", error)
            missing = Message("Classes and confusions are missing: {error}.", error=error)
            yield Section(_CLASSES, [Text(missing, "alert")])
            return
        yield classes_section(main.per_class if main else [])
        yield confusion_section(main.confusion if main else [], main.per_class if main else [])

    @classmethod
    def _retention(cls, context: RoundContext, evaluation: str) -> list[dict[str, Any]] | None:
        """Returns what a merged candidate kept of each of its models that was measured on the same records."""
        merged = context.state.outputs.get("merge")  # whose stage imports this one
        if merged is None:
            return None
        parts: dict[str, dict[str, SuiteResult]] = {}
        for model in context.artifact(merged).meta["merged"]:
            # The champion was measured just now, an earlier round's model where the test set is still the same. The
            # trained model itself is not: that would cost each round an evaluation which decides nothing.
            if artifact := context.find(cls(model, context.state.id("test"))):
                parts[model] = read_evaluation(context.path(artifact.id))
        rows = merge_retention(read_evaluation(context.path(evaluation)), parts, context.seed("retention"))
        for sentence in retention_sentences(rows):
            log.info("  %s", sentence)
        return rows

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the model, the test set, and digests of the other suites' files and functions."""
        return {"model": self.model, "test": self.test, **self._suite_inputs(context)}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the suites and the task."""
        # A list, because the key sorts mappings and the order counts: the first suite's metrics have no prefix.
        suites = [[name, suite.model_dump(mode="json")] for name, suite in context.config.evaluate.suites.items()]
        columns = {"columns": context.config.data.columns} if self._suite_inputs(context) else {}
        return {"suites": suites, "full": self.full, **model_key(context), **columns}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Loads the model and runs the suites."""
        lm = load_model(context, self.model)
        results = {
            name: run_suite(lm, suite_records(context, suite, self.test), suite, name, full=self.full)
            for name, suite in context.config.evaluate.suites.items()
        }
        write_evaluation(out, results)
        return {"metrics": flat_metrics(results), "full": self.full}

    def _suite_inputs(self, context: RoundContext) -> dict[str, str]:
        return suite_digests(context.config, context.workspace.root) | function_digests(context.config)


@dataclass(frozen=True)
class MeasureLatency(CachedWork):
    """Times candidate and champion on the same prompts, interleaved.

    Args:
        candidate: Id of the candidate.
        champion: Id of the champion.
        test: Id of the test set.
    """

    candidate: str
    champion: str
    test: str
    name = "latency"
    kind = "latency"
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns both models and the test set."""
        return {"candidate": self.candidate, "champion": self.champion, "test": self.test}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the repeats and prompts, and the settings by which a model answers."""
        scorer = next(iter(context.config.evaluate.suites.values())).scorer
        latency = context.config.evaluate.latency.model_dump(mode="json")
        return {"latency": latency, "scorer": scorer, **model_key(context)}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Measures percentiles in seconds."""
        config = context.config.evaluate.latency
        records = sample_records(context.dataset(self.test).records, config.prompts)
        prompts = [record_turns(record) for record in records.select(["prompt", "text"]).to_pylist()]
        models = {"candidate": context.model(self.candidate)}
        # Where both are one model it is timed once: of two copies one would seem faster by chance.
        if self.champion != self.candidate:
            models["champion"] = context.model(self.champion)
        main = next(iter(context.config.evaluate.suites.values()))
        latencies = measure_latency(
            models, prompts, config.repeats, answer=answer_function(main, bool(context.config.task.label_set))
        )
        (out / LATENCY).write_text(json.dumps({"champion": latencies["candidate"], **latencies}), encoding="utf-8")
        return {}


def _other_records(record: RoundRecord) -> list[Message]:
    """Returns a sentence where a round was measured on other test records than the one before."""
    row = record.workspace.metadata.round(record.number - 1) if record.number else None
    before = RoundState.from_row(row).test if row else None
    if record.state.test in (None, before) or before is None:
        return []
    template = "measured on other test records than round {round}: the figures of both cannot be compared"
    return [Message(template, round=record.number - 1)]


def measure_latencies(context: RoundContext, candidate: str, champion: str, test: str) -> str | None:
    """Measures the latencies and returns the id of the measurement; None where the config switches it off."""
    if not context.config.evaluate.latency.prompts:
        return None
    return context.run(MeasureLatency(candidate, champion, test)).id


def metrics_of(context: RoundContext, evaluation: str, latency: str | None, role: str) -> dict[str, float]:
    """Reads a model's metrics by bare name; ``role`` is candidate or champion in the latency measurement."""
    metrics = flat_metrics(read_evaluation(context.path(evaluation)))
    if latency is not None:
        values = json.loads((context.path(latency) / LATENCY).read_text(encoding="utf-8"))[role]
        metrics |= {name: value for name, value in values.items() if name != "n"}
    return metrics


_CLASSES = Message("Classes")

_WORST = 20
"""Classes whose recall is drawn."""

_CONFUSED = 8
"""Rows and columns of the map of confusions; more cells could not be read on a page."""


def classes_section(per_class: Sequence[Mapping[str, Any]]) -> Section:
    """Draws the recall of the worst classes, and lists all; rows of ``label``, ``support`` and metrics."""
    # Of equal recalls the class with more records, which costs more mistakes; then by name, so that pages are the same.
    worst = sorted(per_class, key=lambda row: (row["recall"], -row["support"], row["label"]))[:_WORST]
    rows = [(row["label"], row["recall"], f"{100 * row['recall']:.0f}% of {row['support']}") for row in worst]
    title = Message("recall of each class, the worst first")
    chart = bars(rows, title, full=1.0, colour="$green", columns=(Message("class"), Message("recall")))
    if chart is None:
        return Section(_CLASSES, [], Message("There are no results by class."))
    caption = Message(
        "The champion's recall on the test records of each class, the worst first. The next round focuses on the worst "
        "classes."
    )
    columns = tuple(Message(name) for name in ("class", "n", "precision", "recall", "F1"))
    listed = [
        (row["label"], f"{row['support']}", *(f"{row[name]:.2f}" for name in ("precision", "recall", "f1")))
        for row in sorted(per_class, key=lambda row: row["f1"])
    ]
    fold = Message("All {count} classes with precision, recall and F1", count=len(listed))
    return Section(_CLASSES, [Text(caption, "caption"), chart, Fold(fold, [Table(columns, listed, name=fold)])])


def confusion_section(confusion: Sequence[Mapping[str, Any]], per_class: Sequence[Mapping[str, Any]]) -> Section:
    """Draws the most frequent confusions: adds rows and columns until the map is full."""
    none = Message("(none of the labels)")
    counts = {(pair["expected"], pair["predicted"] or none): pair["count"] for pair in confusion}
    rows: list[str] = []
    columns: list[str] = []
    for expected, predicted in sorted(counts, key=lambda pair: (-counts[pair], *pair)):
        if expected == predicted or not counts[expected, predicted]:
            continue
        if len({*rows, expected}) <= _CONFUSED and len({*columns, predicted}) <= _CONFUSED:
            rows += [expected] if expected not in rows else []
            columns += [predicted] if predicted not in columns else []
    # Correct answers follow from the recall.
    counts |= {(row["label"], row["label"]): round(row["recall"] * row["support"]) for row in per_class}
    # Columns in the order of the rows, so that correct answers form the diagonal.
    columns.sort(key=lambda column: rows.index(column) if column in rows else len(rows))
    chart = heat_map(counts, rows, columns, Message("expected answers (rows) by given answers (columns)"))
    caption = Message(
        "The champion's most frequent mistakes: rows are expected answers, columns are predictions, numbers are "
        "counts. Outlined cells are correct answers."
    )
    return Section.of(Message("Confusion"), caption, chart, empty=Message("No wrong answers have been counted."))


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Formats the headline metrics in one line."""
    names = [name for name in _HEADLINES if name in metrics] or list(metrics)[:3]
    return ", ".join(f"{name} {metrics[name]:.3f}" for name in names)
