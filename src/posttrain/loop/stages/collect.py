"""Collect: read, check and clean files and versions; one dataset version each for pool, test and labelled records."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.data.config import DataConfig
from posttrain.data.sets.pool_and_test import LoopData, build_pool_and_test, input_digests
from posttrain.data.versions.named_versions import resolve_versions
from posttrain.data.versions.version import write_dataset
from posttrain.loop.context import RoundContext
from posttrain.loop.suites import suite_digests, suite_settings, suites_beside_test
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import UserError

SETS = ("pool", "test", "labelled")


@dataclass(frozen=True)
class RoundData:
    """Dataset artifacts."""

    pool: Artifact
    test: Artifact
    labelled: Artifact


def with_added_files(config: DataConfig, root: Path) -> DataConfig:
    """The data section with what ``posttrain data add`` put into ``data/pool`` and ``data/labelled``."""
    added = {}
    for name in ("pool", "labelled"):
        files = sorted(path.relative_to(root).as_posix() for path in (root / "data" / name).glob("[!.]*"))
        named = getattr(config, name)
        added[name] = [*named, *[file for file in files if file not in named]]
    return config.model_copy(update=added)


def collect(turn: RoundContext) -> RoundData:
    """The three dataset versions that this round works with.

    Raises:
        UserError: if a file or version is missing or a record is bad, or nothing is left to test on.
    """
    root = turn.workspace.root
    config = with_added_files(turn.config.data, root)
    labels = turn.config.task.label_set
    versions = resolve_versions(config.files, root, turn.workspace)
    suites = suites_beside_test(turn.config)

    @cache
    def built() -> LoopData:
        result = build_pool_and_test(config, root, labels or None, versions, suites)
        if not result.test.num_rows:
            raise UserError(
                "there is no record to test on",
                where="data.test",
                fix="name a file or a dataset version, or a share of `labelled`",
            )
        return result

    settings: dict[str, Any] = {"data": config.model_dump(mode="json"), "labels": labels}
    # Of the files that these steps name the content counts as well.
    if config.drops:
        settings["drop"] = [step.located(root).key() for step in config.drops]
    digests = input_digests(config, root, versions)
    for_training = suite_settings(turn.config, root), suite_digests(turn.config, root)
    artifacts = {}
    for name in SETS:

        def work(out: Path, scratch: Path, name: str = name) -> dict[str, Any]:
            funnel = [entry for entry in built().funnel if entry["set"] == name]
            meta = {"name": name, "funnel": funnel}
            return write_dataset(out, getattr(built(), name), built().rejected[name], meta)

        suite_config, suite_inputs = ({}, {}) if name == "test" else for_training
        inputs, said = digests | suite_inputs, settings | suite_config
        artifact = turn.stage(f"collect {name}", "dataset", inputs, said, work, seeded=False)
        turn.workspace.metadata.name_artifact(name, artifact.id, turn.workspace.metadata.named(name))
        artifacts[name] = artifact
    return RoundData(**artifacts)
