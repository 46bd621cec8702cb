"""Names and reads the files of scores, of a selection and of its labels."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.loop.context import RoundContext
from posttrain.select.hard_cases import HardCase
from posttrain.store.artifacts import Artifact

SCORES, HARD_CASES, LABELLED = "scores.parquet", "hard_cases.npy", "labelled.npy"
"""The score table of the pool; embeddings of hard test records, and of records that have a label: float32 [N, D]."""

UNSCORED = "unscored.parquet"
"""Pool records that were only embedded, by the schema of the scores."""

ASKED_SINCE = "asked_since.parquet"
"""Those of them that were chosen and scored then, by the same schema; lies with the selection."""

LABELLED_SCORES = "labelled.parquet"
"""Scores of records that have a label, such as their loss."""

HARD_RECORDS = "hard_records.json"
"""Pool records that are hard themselves: by id a sentence that says why."""

BATCH, MAP, CASES = "batch.parquet", "map.parquet", "hard_cases.json"
"""The batch with reasons and ranks; the pool in two dimensions; hard test records with the kinds of their cases."""

LABELS, UNLABELLED = "labels.parquet", "unlabelled.json"
"""The labels of a batch, a RECORD table; the reason for each record without one, by its id, where there are any."""


def cases_to_rows(cases: list[HardCase]) -> list[dict[str, object]]:
    """Converts hard cases to JSON values."""
    return [asdict(case) for case in cases]


def cases_from_rows(rows: list[dict[str, object]]) -> list[HardCase]:
    """Reads hard cases from JSON values of `cases_to_rows`."""
    return [HardCase(**{**row, "kinds": tuple(row["kinds"])}) for row in rows]  # type: ignore[arg-type]


def read_champion_scores(scores: Path, selection: Path, columns: list[str] | None = None) -> pa.Table:
    """Reads the champion's scores of a round: of the sample of the pool, and of records scored after their selection.

    Args:
        scores: Folder of the round's scores.
        selection: Folder of its selection.
        columns: Names of columns of the score table; None for all.
    """
    files = [scores / SCORES] + ([selection / ASKED_SINCE] if (selection / ASKED_SINCE).exists() else [])
    return pa.concat_tables([parquet.read_table(file, columns=columns) for file in files])


def load_array(path: Path) -> np.ndarray | None:
    """Loads an array, or returns None without a file: a cold start writes no embeddings of hard cases."""
    return np.load(path, allow_pickle=False) if path.exists() else None


def chosen_records(context: RoundContext, selection: Artifact, pool: Artifact) -> tuple[pa.Table, list[str] | None]:
    """Reads the batch as pool records, best first, and the champion's answers (None before its first training)."""
    batch = parquet.read_table(context.path(selection.id) / BATCH)
    records = context.dataset(pool.id).records
    row_of = {id: row for row, id in enumerate(records["id"].to_pylist())}
    chosen = records.take([row_of[id] for id in batch["id"].to_pylist()])
    predicted = batch["predicted"].to_pylist()
    return chosen, None if None in predicted else predicted
