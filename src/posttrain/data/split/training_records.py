"""What a model may learn from: records that are proven to give away nothing of what models are measured on."""

import logging
from collections.abc import Mapping, Sequence

import pyarrow as pa

from posttrain.data.split.check import require_sound
from posttrain.data.split.proof import Proof
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.versions.recipe import Recipe
from posttrain.data.versions.stored_version import Version

log = logging.getLogger("posttrain")

_NOTHING: Mapping[str, pa.Table] = {}


def training_records(
    version: Version, name: str, measured: Mapping[str, pa.Table] = _NOTHING, step: Decontaminate | None = None
) -> pa.Table:
    """RECORD table of a version's training records.

    Args:
        name: what errors call the version.
        measured: RECORD tables of what the loop measures on, by name, which a set of the loop's must not give away.
        step: with which the loop keeps them apart; None: it does not.

    Raises:
        UserError: training and held-out records share something, or there are no training records.
    """
    if version.whole:
        records = version.records()
        require_apart(records, measured, name, step)
        return records
    held_out = [split for split in version.splits[1:] if version.count(split)]
    records = version.records(version.splits[0])
    if held_out:
        recipe = Recipe.model_validate(version.meta["recipe"])
        proof = Proof.of(next((one for one in recipe.steps if isinstance(one, Decontaminate)), None), recipe.splits)
        _prove([{version.splits[0]: records, **{split: version.records(split) for split in held_out}}], name, proof)
    return records


def require_apart(records: pa.Table, measured: Mapping[str, pa.Table], name: str, step: Decontaminate | None) -> None:
    """Go on only if the training records give nothing away that models are measured on.

    Args:
        records: RECORD table of what is learned from.
        measured: RECORD tables by name, each held against the training records alone.
        name: what errors call the training records.
        step: with which they were taken apart; None: they were not.

    Raises:
        UserError: they share something; names both places.
    """
    pairs = [{"train": records, what: table} for what, table in measured.items() if table.num_rows]
    if records.num_rows and pairs:
        _prove(pairs, name, Proof.of(step, None))


def _prove(splits: Sequence[Mapping[str, pa.Table]], name: str, proof: Proof) -> None:
    for tables in splits:
        require_sound(tables, name, proof.threshold, proof.ngram, group=proof.group, fix=proof.fix)
    if proof.left_out:
        log.warning("%s: the check before training does not look for %s", name, proof.left_out)
