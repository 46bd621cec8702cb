"""From a piece of a file to one RECORD table."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute

from posttrain.data.reading.conversion import Conversion
from posttrain.data.reading.files import DELIMITERS, uniform
from posttrain.data.reading.json_rows import json_lines
from posttrain.data.reading.opening import range_lines
from posttrain.data.reading.paths import file_format, place
from posttrain.data.reading.pieces import Piece
from posttrain.data.reading.problem import Problem, unknown_label
from posttrain.data.reading.row import Row
from posttrain.data.reading.tables import read_rows
from posttrain.data.records.schema import concat


@dataclass(frozen=True)
class PieceRead:
    """Attributes:
    records: RECORD table.
    shape: of the records in the file; None where there are none.
    left_out: how many rows no record was made of, by kind, such as the failed requests of a log.
    """

    records: pa.Table
    shape: str | None
    left_out: dict[str, int]
    user_ids: pa.Table


def read_piece(piece: Piece, columns: Mapping[str, str] | None, labels: Sequence[str] = ()) -> PieceRead:
    """The records of a piece.

    Args:
        labels: the closed label set that answers keep to; empty for open-ended answers.

    Raises:
        UserError: on the first bad record, with file and line.
    """
    path = place(piece.path)
    cells = file_format(path) in DELIMITERS
    conversion = Conversion(piece.name, columns, answers=False, cells=cells, same_columns=uniform(path))
    left_out: Counter[str] = Counter()

    def skipped(problem: Problem) -> None:
        left_out[problem.kind] += 1

    rows: Iterable[Row | Problem]
    if piece.rows is not None:
        rows = piece.rows
    else:
        rows = json_lines(range_lines(piece.path, piece.start, piece.stop), piece.name, piece.first_line)
    table = concat(list(read_rows(rows, conversion, skipped=skipped)))
    if labels:
        _refuse_unknown(table, labels)
    return PieceRead(
        table, conversion.shape.name if conversion.shape else None, dict(left_out), conversion.user_ids.table()
    )


def _refuse_unknown(table: pa.Table, labels: Sequence[str]) -> None:
    known = pa.array([None, *labels], pa.string())
    wrong = pa.compute.invert(pa.compute.is_in(table["completion"], value_set=known))
    for row in table.filter(wrong).slice(0, 1).to_pylist():
        raise unknown_label(row["completion"], labels, row["source"], row["line"]).error()
