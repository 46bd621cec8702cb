"""Suites that merged models are measured on: read from files, and scored for any model in a folder."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field, model_validator

from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers.base import sample_records
from posttrain.evaluate.suite import SuiteResult, run_suite
from posttrain.merge.api import merge
from posttrain.merge.inputs import Key, model_keys
from posttrain.merge.lora_adapter import is_adapter
from posttrain.merge.recipe import Recipe
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig, trained_task
from posttrain.store.errors import UserError, suggest
from posttrain.store.paths import locate_path
from posttrain.store.section import Section
from posttrain.store.yaml_files import read_yaml

_YAML = (".yaml", ".yml")


class MergeSuiteConfig(SuiteConfig):
    """A suite of a file of suites: as one of a workspace's, with its task and the models that were trained for it."""

    data: str = Field(description="The file of records.")
    task: TaskConfig | None = Field(
        default=None, description="System message, labels and so on; null: as the specialist was trained."
    )
    specialist: str | list[str] | None = Field(
        default=None,
        description="The model that was trained for this, or several whose skills it combines, by the name of their "
        "folder; null: the model of the suite's name; [] for none.",
    )


class MergeSuitesConfig(Section):
    """A file of suites."""

    suites: dict[str, MergeSuiteConfig] = Field(description="Suites by name.")

    @model_validator(mode="after")
    def _has_suites(self) -> "MergeSuitesConfig":
        if not self.suites:
            raise ValueError("at least one suite is needed")
        return self


@dataclass(frozen=True)
class MergeSuite:
    """A suite with its records.

    Attributes:
        name: its name.
        config: scorer and the like.
        task: how its records are put to a model.
        records: RECORD table, sampled.
        specialists: keys of the models that were trained for it; empty where none was.
    """

    name: str
    config: SuiteConfig
    task: TaskConfig
    records: pa.Table
    specialists: tuple[Key, ...] = ()

    @property
    def digest(self) -> str:
        """Returns a hash of all that decides a model's score."""
        parts = [self.name, self.config.model_dump_json(), self.task.model_dump_json(), *self.records["id"].to_pylist()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def take(self, rows: Sequence[int]) -> "MergeSuite":
        """Returns the suite with some of its records."""
        return replace(self, records=self.records.take(pa.array(list(rows), pa.int64())))


def read_merge_suites(files: "Sequence[str | MergeSuite]", root: Path, models: Mapping[Key, Path]) -> list[MergeSuite]:
    """Reads suites.

    Args:
        files: files of suites (YAML), files of records, or ``NAME=FILE`` of records. A file of records whose name is a
            model's measures what that model was trained for, with the task of that model's own ``config.yaml``. A
            suite that was read is taken as it is.
        root: the folder that the files are relative to.
        models: folders of the models to merge, by key.

    Raises:
        UserError: a file or a record cannot be read, a name is taken, or no model has a specialist's name.
    """
    suites: dict[str, MergeSuite] = {}
    for item in files:
        if isinstance(item, MergeSuite):
            suites[item.name] = item
            continue
        name, equals, file = item.partition("=")
        if not equals or locate_path(root, item).exists():
            name, file = "", item
        path = locate_path(root, file)
        if not path.is_file():
            raise UserError(f"no such file: {file}", where="suites", fix="check the path")
        if path.suffix in _YAML:
            if name:
                raise UserError(f"`{file}` names its suites itself", where="suites", fix="leave out the name")
            config = MergeSuitesConfig.read(read_yaml(path), file)
            folder, configs = path.parent, config.suites
        else:
            stem = name or re.sub(r"\.(jsonl|json|csv|tsv|parquet|gz|zst)", "", path.name)
            folder, configs = root, {stem: MergeSuiteConfig(data=file)}
        for suite_name, suite in configs.items():
            if suite_name in suites:
                raise UserError(f"there are two suites `{suite_name}`", where=file, fix="rename one")
            suites[suite_name] = _read_suite(suite_name, suite, folder, models)
    return list(suites.values())


def check_merge_suites(
    files: "Sequence[str | MergeSuite]", recipe: Recipe, root: Path, files_root: Path | None = None
) -> None:
    """Raises a UserError where `read_merge_suites` would, before any model is opened."""
    folders = {key: locate_path(root, key[0]) if "://" not in key[0] else Path() for key in model_keys(recipe)}
    read_merge_suites(files, files_root or root, folders)


def _read_suite(name: str, config: MergeSuiteConfig, root: Path, models: Mapping[Key, Path]) -> MergeSuite:
    path = locate_path(root, config.data)
    if not path.exists():
        raise UserError(f"no such file: {config.data}", where=f"{name}.data", fix="check the path")
    records = sample_records(concat(list(read(path, config.columns, name=config.data))), config.sample)
    names = {short_name(key): key for key in models}
    listed = config.specialist if isinstance(config.specialist, list) else [config.specialist or name]
    for model in listed if config.specialist is not None else []:
        if model not in names:
            raise UserError(
                f"`{model}` is not one of the models", where=f"{name}.specialist", fix=suggest(model, names)
            )
    specialists = tuple(names[model] for model in listed if model in names)
    task = config.task.with_labels_from(root) if config.task else None
    if task is None and specialists:
        task = trained_task(models[specialists[0]])
    scorer = config.scorer
    if scorer is None and all(value is not None for value in records["rejected"].to_pylist()):
        scorer = "preference"
    fields = config.model_dump(include=set(SuiteConfig.model_fields)) | {"scorer": scorer}
    return MergeSuite(name, SuiteConfig.read(fields, name), task or TaskConfig(), records, specialists)


def short_name(key: Key) -> str:
    """Returns the last part of a model's path, and of its adapter's, as tables name it."""
    model, adapter = key
    return (adapter or model).rstrip("/").rpartition("/")[2]


def local_models(recipe: Recipe, root: Path, scratch: Path) -> dict[Key, Path]:
    """Returns a Hugging Face folder for each model and base of a recipe.

    A folder stays where it is; an adapter is merged into its model, in float32, and what lies on the Hub, in an object
    store or in a GGUF file is written to ``scratch``, once for all trials and suites.

    Raises:
        UserError: a model is missing or damaged.
    """
    folders: dict[Key, Path] = {}
    for number, (model, adapter) in enumerate(model_keys(recipe)):
        folder = locate_path(root, model) if "://" not in model else None
        if adapter is None and folder is not None and folder.is_dir() and not is_adapter(folder):
            folders[model, adapter] = folder
            continue
        alone = adapter is not None or (folder is not None and folder.is_dir())
        entry: dict[str, Any] = {"model": model, "adapter": adapter}
        values = {"method": "passthrough", "models": [entry]} | ({"dtype": "float32"} if alone else {})
        out = scratch / f"model-{number}"
        if not out.exists():
            merge(Recipe.read(values, "recipe"), out, root=root)
        folders[model, adapter] = out
    return folders


def local_recipe(recipe: Recipe, folders: Mapping[Key, Path]) -> Recipe:
    """Returns the recipe with the folders of `local_models` in place of the names."""
    values = recipe.model_dump(exclude_unset=True)
    for given, entry in zip(values.get("models", []), recipe.models, strict=True):
        given |= {"model": str(folders[entry.model, entry.adapter].absolute()), "adapter": None}
    if recipe.base is not None:
        values["base"] = str(folders[recipe.base, None].absolute())
    if recipe.tokenizer != "base" and (recipe.tokenizer, None) in folders:
        values["tokenizer"] = str(folders[recipe.tokenizer, None].absolute())
    return Recipe.read(values, "recipe")


def score_suites(folder: Path, suites: Sequence[MergeSuite], precision: str) -> dict[str, SuiteResult]:
    """Scores a model on suites; it is loaded once."""
    lm = load_language_model(folder, TaskConfig(), precision)
    return {suite.name: score_suite(lm, suite) for suite in suites}


def score_suite(lm: LanguageModel, suite: MergeSuite) -> SuiteResult:
    """Scores a loaded model on a suite, under the suite's task."""
    lm.task = suite.task
    return run_suite(lm, suite.records, suite.config, suite.name, full=True)
