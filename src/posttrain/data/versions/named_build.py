"""Builds and names dataset versions, as ``posttrain data add`` does, and removes those that nothing needs.

Versions have semantic names (https://semver.org): what changed decides which number rises.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from posttrain.data.reading.columns import require_column
from posttrain.data.reading.data_files import display_path, expand_paths
from posttrain.data.split import FrozenSplits
from posttrain.data.steps.resources import Files
from posttrain.data.versions.build_version import STAGE, build_version
from posttrain.data.versions.named_versions import RESERVED_NAMES
from posttrain.data.versions.recipe import Recipe, Suite, applicable_steps, default_steps
from posttrain.data.versions.version import Version
from posttrain.jobs.map import open_engine
from posttrain.store.errors import UserError
from posttrain.store.files import remove_tree
from posttrain.store.rows import NamedVersion
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")

Bump = Literal["major", "minor", "patch"]

_FORM = re.compile(r"v?(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})")

_TAG = re.compile(r"(?!v\d)[A-Za-z][A-Za-z0-9_.-]{0,99}")


class BuildConfig(Recipe):
    """Configures the build of a named version: its recipe, its files, and where the work runs."""

    name: str = Field(description="Name of the dataset.")
    files: Files = Field([], description="Files, globs, folders and URLs; added to those of the last version.")
    suites: list[Suite] = Field(
        [], description="Evaluation files that training records must not overlap with, besides held-out records."
    )
    optional_answers: bool = Field(
        False, description="New files may lack the column of answers that `columns` names, as those of a pool do."
    )
    workspace: Path = Field(Path("."), description="The workspace's folder.")
    fresh: bool = Field(False, description="Start from these files alone, not from the last version's.")
    version: str | None = Field(None, description="Semantic version, such as 2.3.1; null: the one after the last.")
    note: str | None = Field(None, description="A note about the version.")
    tags: list[str] = Field([], description="Tags that name this version from now on.")
    engine: Literal["auto", "inline", "processes", "ray"] = Field("auto", description="Engine that runs the steps.")
    workers: int | None = Field(None, description="Processes at a time; null: as many as there are cores.")


def build(config: BuildConfig | Mapping[str, Any], workspace: Workspace | None = None) -> Version:
    """Builds a version and names it, resumes an interrupted build, or returns a finished one.

    Args:
        config: Such as ``{"name": "support", "files": ["new.jsonl"], "steps": ["exact", "minhash"]}``.
        workspace: An open one; None: the one that the config names, created if missing.

    Raises:
        UserError: the config, a file or a record is wrong; nothing is named then.
    """
    config = config if isinstance(config, BuildConfig) else BuildConfig.read(config, "config")
    if not _NAME.fullmatch(config.name):
        raise UserError(f"`{config.name}` is not a name", where="--name", fix="letters, digits, `_`, `-` and `.`")
    if config.name in RESERVED_NAMES:
        raise UserError(f"`{config.name}` is the loop's own", where="--name", fix="take another name")
    # Settings are checked before any work, which may take hours.
    if config.version is not None:
        parse_version(config.version)
    for tag in config.tags:
        check_tag(tag)
    if workspace is None:
        with Workspace.create(config.workspace) as opened:
            return build(config, opened)
    busy = f"another process builds `{config.name}`"
    with workspace.work(), workspace.hold(f"dataset-{config.name}", busy):
        return _build(config, workspace)


def _build(config: BuildConfig, workspace: Workspace) -> Version:
    earlier = workspace.metadata.names(config.name)
    last = earlier[-1] if earlier else None
    before = _last_semantic(earlier)
    if config.version and before and parse_version(config.version) < parse_version(before):
        raise UserError(f"{config.name}@v{before} is there already", where="--version", fix="give a later version")
    parent = None if last is None or config.fresh else Version.open(workspace.artifacts, last.artifact_id)
    # Without files a build only makes sense for the parent's files with another recipe.
    if not config.files and parent is None:
        raise UserError("no file is named", where="files", fix="name a file of records")
    if (answers := (config.columns or {}).get("completion")) and not config.optional_answers:
        for file in expand_paths(config.files, workspace.root):
            require_column(file, display_path(file, workspace.root), answers)
    recipe = _resolve_recipe(config, parent)
    with open_engine(config.engine, config.workers) as engine:
        version = build_version(
            recipe,
            config.files,
            workspace,
            engine=engine,
            grown_from=parent,
            suites=config.suites,
            # Refused at the start of a build, not before: building the version that has this number again only finds
            # it.
            begin=lambda: _refuse_taken(config, earlier),
        )
    semantic = config.version.removeprefix("v") if config.version else next_version(before, _bump(parent, version))
    # Named last: an interrupted build leaves no name.
    number = workspace.metadata.name_artifact(
        config.name,
        version.id,
        parent.id if parent and parent.id != version.id else None,
        semantic=semantic,
        note=config.note,
    )
    for tag in config.tags:
        workspace.metadata.tag(config.name, number, tag)
    return version


def _resolve_recipe(config: BuildConfig, parent: Version | None) -> Recipe:
    """Drops steps that need labels if there are none, and takes the splits as the parent has frozen them."""
    # Not validated again: the config was.
    recipe = Recipe.model_construct(**{name: getattr(config, name) for name in Recipe.model_fields})
    steps = applicable_steps(recipe.steps, recipe.labels)
    skipped = [step.name for step in recipe.steps if step not in steps]
    # Nobody named the default steps, so dropping some of them needs no message.
    if skipped and tuple(recipe.steps) != default_steps():
        log.info("skipping steps that need a closed label set: %s", ", ".join(skipped))
    recipe = recipe.model_copy(update={"steps": steps})
    if parent is None or recipe.splits is None or not parent.meta.get("settled"):
        return recipe
    frozen = FrozenSplits(**parent.meta["settled"])
    # Other settings than the parent's start from scratch; only `since` and `thresholds` are decided by its records.
    configured = recipe.splits.model_dump(exclude={"since", "thresholds"})
    unchanged = frozen.model_dump(include=set(configured)) == configured
    return recipe.model_copy(update={"splits": frozen}) if unchanged else recipe


def _last_semantic(earlier: list[NamedVersion]) -> str | None:
    return next((version.semantic for version in reversed(earlier) if version.semantic), None)


def _refuse_taken(config: BuildConfig, earlier: Sequence[NamedVersion]) -> None:
    """Refuses to give a new version a number that is taken."""
    semantic = config.version and config.version.removeprefix("v")
    other = next((version for version in earlier if semantic and version.semantic == semantic), None)
    if other is not None:
        raise UserError(f"{other.text} is {other.artifact_id} already", where="--version", fix="give a later version")


def _bump(parent: Version | None, version: Version) -> Bump:
    """Returns major if records are processed differently, minor if only files were added, patch if files changed."""
    if parent is None or _recipe_keys(parent) != _recipe_keys(version):
        return "major"
    before = {source["name"]: source["digest"] for source in parent.meta["sources"]}
    after = {source["name"]: source["digest"] for source in version.meta["sources"]}
    return "minor" if before.items() <= after.items() else "patch"


def _recipe_keys(version: Version) -> dict[str, Any]:
    """Returns JSON values that decide how records are processed, wherever the workspace's folder is."""
    return {**version.meta.get("keys", {}), "splits": version.meta.get("settled")}


def check_tag(text: str) -> None:
    """Raises a UserError unless the text can follow the ``@`` of a version's name, and is not a version itself."""
    if not _TAG.fullmatch(text):
        fix = "a letter, then letters, digits, `_`, `-` and `.`, and no version such as v1 or 1.0.0"
        raise UserError(f"`{text}` is not a tag", fix=fix)


def parse_version(text: str) -> tuple[int, int, int]:
    """Reads major, minor and patch of ``2.3.1`` or ``v2.3.1``.

    Raises:
        UserError: it is no such version.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise UserError(f"`{text}` is not a semantic version", where="--version", fix="such as 2.3.1")
    major, minor, patch = map(int, match.groups())
    return major, minor, patch


def next_version(last: str | None, bump: Bump) -> str:
    """Returns the version after ``last``: ``1.0.0`` if there is none."""
    if last is None:
        return "1.0.0"
    major, minor, patch = parse_version(last)
    match bump:
        case "major":
            return f"{major + 1}.0.0"
        case "minor":
            return f"{major}.{minor + 1}.0"
        case "patch":
            return f"{major}.{minor}.{patch + 1}"


@dataclass(frozen=True)
class Garbage:
    """Lists what can be removed.

    Attributes:
        versions: Names to forget.
        artifacts: Ids of datasets and shards to delete, in a safe order.
        size: Bytes of these artifacts.
    """

    versions: Sequence[NamedVersion]
    artifacts: Sequence[str]
    size: int


def find_garbage(workspace: Workspace, keep: int | None = None) -> Garbage:
    """Finds old versions, and shards that no version holds.

    Tagged versions stay, and so do versions that a run used: a model's lineage leads to them.

    Args:
        keep: Number of the newest versions of each name that stay; None: all.
    """
    metadata = workspace.metadata
    versions: list[NamedVersion] = []
    for name in dict.fromkeys(version.name for version in metadata.names()):
        built = [version for version in metadata.names(name) if version.semantic]
        for version in built[: max(0, len(built) - keep)] if keep is not None else []:
            # A model's lineage leads to the versions that a run used.
            if not version.tags and not metadata.consumers(version.artifact_id):
                versions.append(version)
    forgotten = {(version.name, version.version) for version in versions}
    named_ids = {
        version.artifact_id for version in metadata.names() if (version.name, version.version) not in forgotten
    }
    datasets = [id for id in {version.artifact_id for version in versions} if id not in named_ids]
    garbage_ids = set(datasets)
    in_use: set[str] = set()
    for row in metadata.artifacts("dataset"):
        if row.id not in garbage_ids and workspace.artifacts.exists(row.id):
            dataset = Version.open(workspace.artifacts, row.id)
            in_use.update(id for ids in dataset.meta.get("phases", []) for id in ids)
    recorded_ids = {row.id for row in metadata.artifacts()}
    loose = [row.id for row in metadata.artifacts("records") if row.id not in in_use]
    # A build that was killed between committing a shard and recording it leaves one that no row names.
    loose += [id for id in workspace.artifacts.ids() if id.startswith("records-") and id not in recorded_ids | in_use]
    sizes = {row.id: row.size for row in metadata.artifacts()}
    # Datasets go before the shards that they refer to.
    artifacts = [*sorted(datasets), *loose]
    return Garbage(versions, artifacts, sum(sizes.get(id, 0) for id in artifacts))


def remove_garbage(workspace: Workspace, garbage: Garbage) -> None:
    """Forgets the versions, then deletes their artifacts and the scratch folders of failed builds."""
    for version in garbage.versions:
        # Names go first: a kill leaves artifacts without a name, never a name without its artifact.
        workspace.metadata.forget_version(version.name, version.version)
    for id in garbage.artifacts:
        workspace.metadata.forget_artifact(id)
        workspace.artifacts.delete(id)
    for run in workspace.metadata.runs():
        if run.stage == STAGE and run.status != "done":
            remove_tree(workspace.scratch / run.key)
