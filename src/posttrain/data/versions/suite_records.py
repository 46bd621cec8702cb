"""The records of a suite, as training records are compared with them."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from posttrain.data.reading.paths import place
from posttrain.data.reading.tables import read
from posttrain.data.records.schema import RECORD, concat
from posttrain.data.steps.step import RowStep
from posttrain.data.versions.named_versions import Versions, records_to_test_on
from posttrain.data.versions.recipe import Recipe, Suite


def suite_tables(suites: Iterable[Suite], recipe: Recipe, root: Path, versions: Versions) -> dict[str, pa.Table]:
    """RECORD table of the suites of each file, which several may read, each by columns of its own."""
    tables: dict[str, list[pa.Table]] = {}
    for suite in {suite.model_dump_json(): suite for suite in suites}.values():
        tables.setdefault(suite.file, []).append(suite_records(suite, recipe, root, versions))
    return {file: concat(found) for file, found in tables.items()}


def suite_records(suite: Suite, recipe: Recipe, root: Path, versions: Versions) -> pa.Table:
    """RECORD table of a suite's records, rewritten as the training records are that they are compared with."""
    if suite.file in versions:
        table = records_to_test_on(versions[suite.file], suite.file, ())
    else:
        at = place(suite.file) if "://" in suite.file else root / Path(suite.file).expanduser()
        table = concat(list(read(at, suite.columns or recipe.columns, name=suite.file)))
    for step in recipe.steps:
        if step.evaluation and isinstance(step, RowStep):
            outcome = step.apply(table)
            # Models are measured on those too that the step would not let into training.
            table = concat([outcome.kept, outcome.rejected.select(RECORD.names)])
    return table
