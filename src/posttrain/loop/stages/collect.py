"""Collect: reads, checks and cleans files and versions into three datasets: pool, test and labelled records."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.data.config import DataConfig
from posttrain.data.sets.pool_and_test import LoopData, build_pool_and_test, input_digests
from posttrain.data.versions.named_versions import resolve_versions
from posttrain.data.versions.version import write_dataset
from posttrain.loop.context import RoundContext
from posttrain.loop.difficulty import check_columns
from posttrain.loop.history import parent_dataset
from posttrain.loop.own_batches import write_own_labels
from posttrain.loop.record import LoopRecord
from posttrain.loop.stage import CachedWork, RoundStep
from posttrain.loop.stages.dataset import rebuild_training_set
from posttrain.loop.stages.label import check_answers
from posttrain.loop.state import RoundState
from posttrain.loop.suites import other_suites, suite_inputs, suite_settings
from posttrain.report.charts.bars import funnel_charts
from posttrain.report.formatting import reason_text
from posttrain.report.section import Cell, Section, Table, Text
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import UserError
from posttrain.store.logs import EVENT
from posttrain.store.message import Message
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

SETS = ("pool", "test", "labelled")


@dataclass(frozen=True)
class RoundData:
    """The dataset artifacts that a round works with."""

    pool: Artifact
    test: Artifact
    labelled: Artifact


class Collect(RoundStep):
    """Collects the records of a round."""

    name = "collect"
    title = Message("collect")

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Collects the records, and checks before any model is loaded that later stages can use them."""
        # A wrong label in the oracle's file would otherwise end the round after the pool was scored.
        check_answers(context.config, context.workspace.root)
        # Before the pool is built, so that nobody is asked for labels that are there.
        for name, own in write_own_labels(context.workspace, context.config).items():
            if own.is_new:
                log.info("  labels of the batch %s that join the training set: %d", name, own.labels)
        data = collect(context)
        if context.number:
            # Now, as the stages before the next training set read its parent too.
            rebuild_training_set(context, parent_dataset(context.workspace))
        check_columns(context, data.pool.id, data.labelled.id)
        # Logged after the checks: a user's mistake is one line and nothing else.
        if context.number:
            log.info("round %d", context.number)
        else:
            log.info("round 0: baseline", extra=EVENT)
            for artifact in (data.pool, data.test, data.labelled):
                counts = artifact.meta["counts"]
                if artifact is data.labelled and not counts["records"] + counts["rejected"]:
                    continue
                log.info("  %s: %d records, %d rejected", artifact.meta["name"], counts["records"], counts["rejected"])
        return context.update(pool=data.pool.id, test=data.test.id, files=data.labelled.id)

    @classmethod
    def sections(cls, loop: LoopRecord) -> Iterator[Section]:
        """Yields the records read, rejected and kept, and the dataset versions."""
        yield data_section(loop.workspace)


def data_section(workspace: Workspace) -> Section:
    """Shows how many records of each set came in, why others were rejected, and the dataset versions."""
    counts: list[tuple[str, str | None, int]] = []
    for name in ("pool", "labelled", "test"):
        row = workspace.metadata.artifact(workspace.metadata.named(name) or "")
        for entry in row.meta["funnel"] if row else []:
            if entry["step"] != "kept" and entry["count"]:
                reason = None if entry["step"] == "read" else reason_text(entry["reason"] or entry["step"])
                counts.append((name, reason, entry["count"]))
    versions = []
    for named in workspace.metadata.names():
        if artifact := workspace.metadata.artifact(named.artifact_id):
            records = ", ".join(f"{count:,} {reason_text(name)}" for name, count in artifact.meta["counts"].items())
            ids = (Cell(code=id) if id else "–" for id in (named.artifact_id, named.parent))
            versions.append((f"{named.name}@v{named.version}", records, *ids))
    return funnels_section(counts, versions)


def funnels_section(counts: Sequence[tuple[str, str | None, int]], versions: Sequence[Sequence[str | Cell]]) -> Section:
    """Draws the records of each set as `funnel_charts` takes them, and lists dataset versions."""
    caption = Message(
        "Records read, rejected by reason, and kept. Every rejected record is stored with its reason and can be listed."
    )
    columns = (Message("version"), Message("records"), Message("id"), Message("made from"))
    table = (Text(Message("Dataset versions"), "heading"), Table(columns, versions, style="cards"))
    return Section.of(
        Message("Data"),
        caption,
        ((Text(name, "heading"), chart) for name, chart in funnel_charts(counts)),
        table if versions else None,
        empty=Message("No data has been added yet."),
    )


class CollectSet(CachedWork):
    """Builds one of the three sets; all three come from one pass over the files.

    Args:
        set: ``pool``, ``test`` or ``labelled``.
        sources: The files and versions that the sets are built from, shared by the three.
    """

    kind = "dataset"
    seeded = False

    def __init__(self, set: str, sources: "_Sources") -> None:
        self.set, self.sources, self.name = set, sources, f"collect {set}"

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns digests of the files, and of the suites that training records must not repeat."""
        # Records that repeat a suite are removed from training, never from the test set: it is measured on itself.
        suites = {} if self.set == "test" else suite_inputs(context.config, context.workspace.root)
        return self.sources.digests | suites

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the data section, with the content of the files that its steps name."""
        suites = {} if self.set == "test" else suite_settings(context.config, context.workspace.root)
        return self.sources.settings | suites

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the set with its rejections."""
        built = self.sources.built
        funnel = [entry for entry in built.funnel if entry["set"] == self.set]
        return write_dataset(
            out, getattr(built, self.set), built.rejected[self.set], {"name": self.set, "funnel": funnel}
        )


class _Sources:
    """The files and versions of the config, read at most once."""

    def __init__(self, context: RoundContext) -> None:
        self.root, self.task = context.workspace.root, context.config.task
        # Answers with several parts may conflict, too.
        self.labels = self.task.label_names
        self.config = with_added_files(context.config.data, self.root)
        self.versions = resolve_versions(self.config.files, self.root, context.workspace)
        self.suites = other_suites(context.config)
        self.digests = input_digests(self.config, self.root, self.versions)

    @property
    def settings(self) -> dict[str, Any]:
        values: dict[str, Any] = {"data": self.config.model_dump(mode="json"), "labels": self.labels}
        values |= {"answers": self.task.kind} if self.task.read_answer else {}
        # A step that drops records by a file depends on the content of that file too.
        if steps := [step for step in self.config.every_round_steps if not step.training_only]:
            values["drop"] = [step.located(self.root).key() for step in steps]
        return values

    # Cached and lazy: three stages share one pass over the files, and none reads them if all three are found.
    @cached_property
    def built(self) -> LoopData:
        labels, read_answer = self.labels or None, self.task.read_answer
        data = build_pool_and_test(self.config, self.root, labels, self.versions, self.suites, read_answer)
        if not data.test.num_rows:
            raise UserError(
                "there is no record to test on",
                where="data.test",
                fix="name a file or a dataset version, or a share of `labelled`",
            )
        return data


def collect(context: RoundContext) -> RoundData:
    """Builds or finds the three dataset versions that this round works with.

    Raises:
        UserError: a file or version is missing, a record is bad, or no record is left to test on.
    """
    sources, metadata = _Sources(context), context.workspace.metadata
    artifacts = {}
    for name in SETS:
        artifacts[name] = context.run(CollectSet(name, sources))
        metadata.name_artifact(name, artifacts[name].id, metadata.named(name))
    return RoundData(**artifacts)


def with_added_files(config: DataConfig, root: Path) -> DataConfig:
    """Adds the files that ``posttrain data add`` put into ``data/pool`` and ``data/labelled`` to the data section."""
    added = {}
    for name in ("pool", "labelled"):
        files = sorted(path.relative_to(root).as_posix() for path in (root / "data" / name).glob("[!.]*"))
        listed = getattr(config, name)
        added[name] = [*listed, *[file for file in files if file not in listed]]
    return config.model_copy(update=added)
