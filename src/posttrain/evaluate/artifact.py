"""An evaluation as files: one JSON of metrics and one Parquet of predictions a suite."""

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.evaluate.suite import SuiteResult
from posttrain.store.errors import WorkError

_INDEX = "evaluation.json"
_FIELDS = ("scorer", "main", "paired", "metrics", "counts", "per_class", "confusion")


def write_evaluation(folder: Path, results: Mapping[str, SuiteResult]) -> None:
    """Write ``evaluation.json`` and ``predictions-SUITE.parquet``; equal results give equal bytes.

    Args:
        folder: exists.
        results: by suite name, in the config's order.
    """
    suites = [
        {"name": name, **{field: getattr(result, field) for field in _FIELDS}} for name, result in results.items()
    ]
    text = json.dumps({"suites": suites}, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / _INDEX).write_text(text + "\n", encoding="utf-8")
    for name, result in results.items():
        pq.write_table(result.predictions, _table(folder, name))


def read_evaluation(folder: Path) -> dict[str, SuiteResult]:
    """Read what ``write_evaluation`` wrote.

    Raises:
        WorkError: if the folder holds no evaluation or it cannot be read.
    """
    try:
        suites = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["suites"]
        return {
            suite["name"]: SuiteResult(**suite, predictions=pq.read_table(_table(folder, suite["name"])))
            for suite in suites
        }
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise WorkError(f"{folder} holds no readable evaluation: {error}") from error


def _table(folder: Path, suite: str) -> Path:
    return folder / f"predictions-{suite}.parquet"
