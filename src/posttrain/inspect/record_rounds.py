"""What each round recorded about a record: its scores, whether and why it was chosen, who labelled it."""

import json
import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.inspect.labelled_records import embedded, inputs
from posttrain.loop.context import RoundContext, known_inputs
from posttrain.loop.history import finished_rounds
from posttrain.loop.registry import Registry
from posttrain.loop.score_files import BATCH, LABELLED_SCORES, UNSCORED, read_champion_scores
from posttrain.loop.stages.label import LABELS
from posttrain.select.scores.config import CHAMPION
from posttrain.select.scores.table import embed_records
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.rows import Round

log = logging.getLogger("posttrain")


def record_rounds(context: RoundContext, input_id: str) -> list[dict[str, Any]]:
    """What each round that considered an input said of it: ``round, scores, chosen, labelled``.

    ``scores`` are the columns of the score table that are one number or word each, or those of `LABELLED_SCORES` where
    the record had a label, null where the champion was asked nothing; ``chosen`` holds ``reason``, ``why`` and
    ``rank``, ``labelled`` the ``label`` and who gave it; None where there is nothing.
    """
    entries: list[dict[str, Any]] = []
    for entry in context.workspace.metadata.rounds():
        if "selection" not in entry.detail:
            continue
        try:
            entries += _round_entry(context, entry, input_id)
        except DamagedArtifactError as error:
            log.warning("%s; what round %d said of the record is not known", error, entry.number)
    return entries


def first_training_round(context: RoundContext, input_id: str) -> int | None:
    """The first round whose training set holds the input; None where no finished round's is known to."""
    for entry in finished_rounds(context.workspace):
        dataset = entry.detail.get("dataset")
        try:
            if dataset and input_id in known_inputs(context, dataset):
                return entry.number
        except DamagedArtifactError as error:
            log.warning("%s; what round %d learned from is not known", error, entry.number)
    return None


def _round_entry(context: RoundContext, entry: Round, input_id: str) -> list[dict[str, Any]]:
    """What one round said of an input, if anything."""
    pool = context.dataset(entry.detail["asked"]).records
    ids = pool.filter(compute.equal(pool["input_id"], input_id))["id"].to_pylist()
    if not ids:
        return []
    folder = context.path(entry.detail["scores"])
    selection = context.path(entry.detail["selection"])
    scores = _find_row(read_champion_scores(folder, selection), ids[0])
    if scores is None and (folder / UNSCORED).exists():
        scores = _find_row(parquet.read_table(folder / UNSCORED), ids[0])
    if scores is None and (folder / LABELLED_SCORES).exists():
        scores = _find_row(parquet.read_table(folder / LABELLED_SCORES), input_id, "input_id")
    chosen = _find_row(parquet.read_table(selection / BATCH), ids[0])
    labelled = None
    if chosen and (id := entry.detail.get("labelled")):
        labelled = _find_row(parquet.read_table(context.path(id) / LABELS), ids[0])
    if not scores and not chosen:
        return []
    return [
        {
            "round": entry.number,
            "scores": scores,
            "chosen": chosen and {name: chosen.get(name) for name in ("reason", "why", "rank")},
            "labelled": labelled and {"label": labelled["completion"], **_provenance(labelled)},
        }
    ]


def annotation_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """Who gave a record of the training set its label; None where a file did."""
    return _provenance(record).get("labelled_by")


def nearest_labelled(context: RoundContext, record: dict[str, Any], dataset: str, count: int) -> list[dict[str, Any]]:
    """The labelled records whose inputs lie nearest to a record's, by the cosine of the champion's embeddings.

    Returns:
        ``id, label, input, similarity, source, line``, the nearest first; of equal ones the earlier in the set.
    """
    labelled = context.dataset(dataset).records
    if not labelled.num_rows:
        return []
    similarity = cosine_similarities(context, record, dataset)
    rows = np.argsort(-similarity, kind="stable")[:count]
    near = labelled.take(pa.array(rows))
    columns = zip(near.to_pylist(), inputs(near), similarity[rows].tolist(), strict=True)
    return [
        {"id": row["id"], "label": row["completion"], "input": text, "similarity": like}
        | {name: row[name] for name in ("source", "line")}
        for row, text, like in columns
    ]


def cosine_similarities(context: RoundContext, record: dict[str, Any], dataset: str) -> np.ndarray:
    """The cosine of the champion's embeddings of a record's input and of each of a set: float64 [N]."""
    theirs = embedded(context, dataset, CHAMPION).astype(np.float64)
    table = pa.Table.from_pylist([record], schema=context.dataset(dataset).records.schema)
    own = embed_records(context.model(Registry(context.workspace).in_service), table)[0].astype(np.float64)
    sizes = np.linalg.norm(theirs, axis=1) * np.linalg.norm(own)
    similarities: np.ndarray = theirs @ own / np.where(sizes > 0, sizes, 1)
    return similarities


def _find_row(table: pa.Table, id: str, by: str = "id") -> dict[str, Any] | None:
    """The row of an id, without lists."""
    plain = [field.name for field in table.schema if field.name != "embedding" and not _is_list(field.type)]
    rows = table.filter(compute.equal(table[by], id)).select(plain).to_pylist()
    return rows[0] if rows else None


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind))


def _provenance(record: dict[str, Any]) -> dict[str, Any]:
    meta = json.loads(record.get("meta") or "{}")
    return {"labelled_by": meta["labelled_by"]} if "labelled_by" in meta else {}
