"""What a model may learn from: records that are proven to give away nothing of what models are measured on."""

import logging

import pyarrow as pa

from posttrain.data.split.check import require_sound
from posttrain.data.split.proof import Proof
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.versions.recipe import Recipe
from posttrain.data.versions.stored_version import Version

log = logging.getLogger("posttrain")


def training_records(
    version: Version, name: str, test: pa.Table | None = None, step: Decontaminate | None = None
) -> pa.Table:
    """RECORD table of a version's training records.

    Args:
        name: what errors call the version.
        test: RECORD table of the loop's test records, which a set of the loop's must not give away.
        step: with which the loop keeps them apart; None: it does not.

    Raises:
        UserError: training and held-out records share something, or there are no training records.
    """
    if version.whole:
        records = version.records()
        if test is not None:
            require_apart(records, test, name, step)
        return records
    held_out = [split for split in version.splits[1:] if version.count(split)]
    records = version.records(version.splits[0])
    if held_out:
        recipe = Recipe.model_validate(version.meta["recipe"])
        proof = Proof.of(next((one for one in recipe.steps if isinstance(one, Decontaminate)), None), recipe.splits)
        _prove({version.splits[0]: records, **{split: version.records(split) for split in held_out}}, name, proof)
    return records


def require_apart(records: pa.Table, test: pa.Table, name: str, step: Decontaminate | None) -> None:
    """Go on only if the training records give nothing of the test set away.

    Args:
        records: RECORD table of what is learned from.
        test: RECORD table of the test set.
        name: what errors call the training records.
        step: with which they were taken apart; None: they were not.

    Raises:
        UserError: they share something; names both places.
    """
    if records.num_rows and test.num_rows:
        _prove({"train": records, "test": test}, name, Proof.of(step, None))


def _prove(tables: dict[str, pa.Table], name: str, proof: Proof) -> None:
    require_sound(tables, name, proof.threshold, proof.ngram, group=proof.group, fix=proof.fix)
    if proof.left_out:
        log.warning("%s: the check before training does not look for %s", name, proof.left_out)
