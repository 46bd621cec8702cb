"""Measures the conflicts between models: in their weights, and on records in the loss between them."""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from posttrain.merge.api import planned_merge
from posttrain.merge.conflicts import ConflictReport, measure_conflicts
from posttrain.merge.engine import MEMORY
from posttrain.merge.recipe import Recipe
from posttrain.merge.recommendation import LossBarrier
from posttrain.store.errors import UserError
from posttrain.tune.merges.importance import ModelImportance, layer_values, measure_importances
from posttrain.tune.merges.loss_barrier import measure_barriers
from posttrain.tune.merges.points import merge_points, read_data

log = logging.getLogger("posttrain")


def measure_report(
    recipe: Recipe,
    root: Path,
    files: Sequence[str] = (),
    *,
    memory: int = MEMORY,
    threads: int | None = None,
    parent: Path | None = None,
) -> tuple[ConflictReport, list[LossBarrier], list[ModelImportance]]:
    """Measures the conflicts between the models of a recipe; its method does not count.

    Args:
        recipe: the recipe, with a base and without slices.
        root: the folder that the paths of its models are relative to.
        files: records, as `read_data` takes them; without, losses and importances are not measured.
        memory: bytes of weights that are held at once.
        threads: that work side by side; one a core by default.
        parent: the folder in which models are written one by one; the system's for temporary files by default.

    Returns:
        The conflicts between the weights; the loss barriers between each two models, on the records of all; and the
        importance of each model's layers for its own records, by gradient.

    Raises:
        UserError: a model or a record cannot be used.
    """
    entries = [entry for entry in recipe.models if entry.model != recipe.base or entry.adapter]
    models = [{"model": entry.model, "adapter": entry.adapter} for entry in entries]
    values = {"base": recipe.base, "models": models, "align": recipe.align, "tokenizer": recipe.tokenizer}
    compared = Recipe.read(values | {"method": "task_arithmetic", "seed": recipe.seed}, "merge")
    barriers: list[LossBarrier] = []
    importances: list[ModelImportance] = []
    if files:
        by_entry = dict(zip(map(id, recipe.models), read_data(recipe, files, root), strict=True))
        data = [by_entry[id(entry)] for entry in entries]
        distinct = {id(examples): examples for examples in data}.values()
        with merge_points(compared, root, parent, memory) as points:
            everything = [example for examples in distinct for example in examples]
            barriers = measure_barriers(points, everything, seed=recipe.seed)
            try:
                importances = measure_importances(points, data, seed=recipe.seed)
            except UserError as error:
                # Of families whose heads are not known the page has all but this.
                log.warning("importances are not measured: %s", error)
    with planned_merge(compared, root, Path(tempfile.gettempdir())) as (plan, _):
        report = measure_conflicts(plan, memory, threads, layer_values(importances) if importances else None)
    return report, barriers, importances
