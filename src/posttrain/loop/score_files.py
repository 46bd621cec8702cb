"""The files of a score artifact and of a selection: their names, and how to read them."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.loop.context import RoundContext
from posttrain.select.hard_cases import HardCase
from posttrain.store.artifacts import Artifact

SCORES, HARD_CASES, LABELLED = "scores.parquet", "hard_cases.npy", "labelled.npy"

UNSCORED = "unasked.parquet"  # what was only embedded, by the schema of the scores

SCORED_LATER = "asked_since.parquet"  # what of it was chosen and asked then, by the same schema

LABELLED_SCORES = "labelled.parquet"  # of records that have a label: their loss and the like

BATCH, MAP, CASES = "batch.parquet", "map.parquet", "hard_cases.json"


def cases_to_rows(cases: list[HardCase]) -> list[dict[str, object]]:
    """Hard cases as JSON holds them."""
    return [asdict(case) for case in cases]


def cases_from_rows(rows: list[dict[str, object]]) -> list[HardCase]:
    """What `cases_to_rows` made of hard cases, read again."""
    return [HardCase(**{**row, "kinds": tuple(row["kinds"])}) for row in rows]  # type: ignore[arg-type]


def read_champion_scores(scores: Path, selection: Path, columns: list[str] | None = None) -> pa.Table:
    """What the champion of a round said of records: the sample that it was asked about, and what was chosen beside it.

    Args:
        scores: folder of the round's scores.
        selection: folder of its selection.
        columns: of the score table; None for all.
    """
    files = [scores / SCORES] + ([selection / SCORED_LATER] if (selection / SCORED_LATER).exists() else [])
    return pa.concat_tables([parquet.read_table(file, columns=columns) for file in files])


def load_array(path: Path) -> np.ndarray | None:
    return np.load(path, allow_pickle=False) if path.exists() else None


def chosen_records(context: RoundContext, selection: Artifact, pool: Artifact) -> tuple[pa.Table, list[str] | None]:
    """The batch as pool records, best first, and the champion's answers (None while it knows nothing)."""
    batch = parquet.read_table(context.path(selection.id) / BATCH)
    records = context.dataset(pool.id).records
    row_of = {id: row for row, id in enumerate(records["id"].to_pylist())}
    chosen = records.take([row_of[id] for id in batch["id"].to_pylist()])
    predicted = batch["predicted"].to_pylist()
    return chosen, None if None in predicted else predicted
