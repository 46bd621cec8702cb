"""What a model may learn from: the training side of a version whose split is proven to be one."""

import pyarrow as pa

from posttrain.data.recipe import Recipe
from posttrain.data.split_check import require_sound
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.stored_version import Version


def training_records(version: Version, name: str) -> pa.Table:
    """RECORD table of a version's training records.

    Args:
        name: what errors call the version.

    Raises:
        UserError: training and held-out records share something, or there are no training records.
    """
    if version.whole:
        return version.records()
    held_out = [split for split in version.splits[1:] if version.count(split)]
    records = version.records(version.splits[0])
    if held_out:
        recipe = Recipe.model_validate(version.meta["recipe"])
        step = next((one for one in recipe.steps if isinstance(one, Decontaminate)), None)
        threshold = step.threshold if step else recipe.splits.near_duplicates if recipe.splits else None
        tables = {version.splits[0]: records, **{split: version.records(split) for split in held_out}}
        require_sound(
            tables, name, threshold, step.ngram if step else 13, group=bool(recipe.splits and recipe.splits.group)
        )
    return records
