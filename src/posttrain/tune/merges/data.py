"""Merging with methods that need data: reads the records that a recipe names, and merges."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.data.reading.columns import detect_columns
from posttrain.data.reading.data_files import DataPath, access_problem, locate_file
from posttrain.data.reading.hub import fetch_hub_dataset
from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.merge.api import MergeResult, merge, recipe_of_call
from posttrain.merge.recipe import Recipe
from posttrain.merge.statistics import Example
from posttrain.models.task import record_turns
from posttrain.store.errors import UserError
from posttrain.store.hub import HUB_PREFIX

_FIX = "say which in a recipe: statistics: {columns: {prompt: COLUMN, completion: COLUMN}}"


def merge_on_data(
    recipe: Recipe | Path | str | Mapping[str, Any] | Sequence[Path | str],
    out: Path | str,
    *,
    data: str | Path | Sequence[str | Path] | None = None,
    root: Path | None = None,
    **options: Any,
) -> MergeResult:
    """Merges models as `posttrain.merge.merge`, with the records that methods such as ``fisher`` need of each.

    Args:
        recipe: a recipe, which may name the records itself, or the models.
        out: the folder to write.
        data: a file of records, its URL or ``hub:OWNER/NAME:SPLIT``, for all models; or a list, one per model.
        root: the folder that relative paths start from; that of the recipe's file, or the current one, by default.
        options: further arguments of `posttrain.merge.merge`.

    Raises:
        UserError: the models cannot be merged so, or a record is bad.
    """
    merge_options = {key: options.pop(key) for key in ("memory", "workers", "shard_bytes") if key in options}
    read_recipe, folder = recipe_of_call(recipe, root, **options)
    read_recipe = with_data(read_recipe, [data] if isinstance(data, str | Path) else data or [])
    return merge(read_recipe, out, root=folder, data=read_examples(read_recipe, folder), **merge_options)


def with_data(recipe: Recipe, files: Sequence[str | Path]) -> Recipe:
    """Returns the recipe with files of records: one for all models, or one per model.

    Raises:
        UserError: there are neither one nor as many as models.
    """
    names = [str(file) for file in files]
    if len(names) < 2:
        return recipe.model_copy(update={"data": names[0]}) if names else recipe
    if len(names) != len(recipe.models):
        raise UserError(
            f"{len(names)} files for {len(recipe.models)} models", where="data", fix="give one, or one per model"
        )
    models = [entry.model_copy(update={"data": name}) for entry, name in zip(recipe.models, names, strict=True)]
    return recipe.model_copy(update={"models": models})


def read_examples(recipe: Recipe, root: Path) -> dict[str, list[Example]]:
    """Reads the records that a recipe names: at most as many of each file as it says, drawn by its seed.

    Args:
        recipe: the recipe.
        root: the folder that relative files start from.

    Returns:
        Conversations with their answers, by the name of the file in the recipe.

    Raises:
        UserError: a file is missing, a record is bad, or none has an answer.
    """
    return {
        name: draw_examples(
            read_records(name, root, recipe.statistics.columns), recipe.statistics.examples, recipe.seed, name
        )
        for name in recipe.data_files()
    }


def draw_examples(records: pa.Table, count: int, seed: int, name: str) -> list[Example]:
    """Draws records with an answer, in their order.

    Args:
        records: RECORD table.
        count: most examples.
        seed: of the draw.
        name: of the records, for the error.

    Raises:
        UserError: no record has an answer.
    """
    answered = np.flatnonzero(records["completion"].is_valid().to_numpy(zero_copy_only=False))
    if not len(answered):
        raise UserError("no record has an answer", where=name, fix="statistics of a model need answers of its task")
    chosen = np.random.default_rng(seed).permutation(answered)[:count]
    rows = records.take(pa.array(np.sort(chosen))).to_pylist()
    return [(record_turns(row), row["completion"]) for row in rows]


def read_records(name: str, root: Path, columns: Mapping[Any, str]) -> pa.Table:
    """Reads a file of records, its URL, or a dataset of the Hub."""
    if name.startswith(HUB_PREFIX):
        files: dict[str, DataPath] = {f"{name}/{file.name}": file for file in fetch_hub_dataset(name)}
    else:
        files = {name: locate_file(root, name)}
    tables = []
    for shown, file in files.items():
        if problem := access_problem(file, shown):
            raise problem.error()
        mapping = detect_columns(file, shown, _FIX, columns).mapping
        tables += list(read(file, mapping, name=shown))
    return concat(tables)
