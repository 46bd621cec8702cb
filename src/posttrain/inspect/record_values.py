"""Values labelled records, sources or labels by their contribution to predicting the others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.attribution.valuation import (
    DATA_OOB,
    ValuationMethod,
    Values,
    check_features,
    cross_validated_values,
)
from posttrain.inspect.labelled_records import embed_dataset, inputs, labelled_dataset
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.stage import CachedWork
from posttrain.models.linear_head import assign_folds
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

By = Literal["record", "source", "label"]

SURE = 2.0
"""Number of standard errors below the harmless value from which a record is surely harmful."""

_VALUES = "values.npy"


@dataclass(frozen=True)
class RecordValues:
    """A table of values, the worst first; rows without a value last.

    Attributes:
        table: For records ``id, input_id, value, standard_error, harmful, weight, label, input, source, line``; for
            sources and labels ``name, records, total, value, standard_error, harmful``, where value and standard error
            are averages over their records. ``harmful`` is true if the value lies `SURE` standard errors below
            ``harmless``; ``weight`` is the probability that it lies above, if its error is normal, and 1 if that is
            unknown.
        harmless: The value of a record that changes nothing.
        folds: Number of parts that were held out in turn; None where no record was held out.
    """

    table: pa.Table
    harmless: float
    folds: int | None

    @property
    def harmful(self) -> pa.Table:
        """Returns the rows that are surely harmful."""
        return self.table.filter(self.table["harmful"])

    @property
    def unknown(self) -> int:
        """Returns the number of rows without a value."""
        return int(self.table["value"].null_count)


def value_labelled(
    workspace: Workspace, config: Config, method: ValuationMethod, by: By, folds: int, embedder: str, seed: int
) -> RecordValues:
    """Values the records that the loop has labels of; finished work is found again.

    Args:
        workspace: The workspace.
        config: Its config.
        method: Method of valuation.
        by: Unit to value.
        folds: Number of parts that are held out in turn.
        embedder: Model that computes the features; see `posttrain.inspect.labelled_records.embed_dataset`.
        seed: Seed of the assignment to parts.

    Raises:
        UserError: nothing has been labelled yet, or fewer than two labels have two records each.
    """
    # Against each other and never against test records: a gate could no longer judge by test records that had decided
    # which records are trained on.
    context = RoundContext(workspace, config, 0, in_round=False)
    with workspace.work():
        dataset = labelled_dataset(context)
        records = context.dataset(dataset).records
        features = embed_dataset(context, dataset, embedder)
        stage = ValueDataset(dataset, records, features, method, by, folds, embedder, seed)
        artifact = context.run(stage)
        numbers = np.load(context.path(artifact.id) / _VALUES, allow_pickle=False)
    return _valued(records, Values(numbers[0], numbers[1]), method, by, folds)


@dataclass(frozen=True)
class ValueDataset(CachedWork):
    """Values the labelled records of a workspace; the arguments are those of `value_labelled`."""

    dataset: str
    records: pa.Table
    features: npt.NDArray[np.float32]
    method: ValuationMethod
    by: By
    folds: int
    embedder: str
    fold_seed: int
    name = "value"
    kind = "values"
    version = 3
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the records and their features."""
        return {"dataset": self.dataset, "features": _digest(self.features)}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the method and the folds."""
        method = self.method
        settings = {"method": method.name, "draws": method.draws, "seed": method.seed}
        settings |= {"by": self.by, "folds": self.folds, "fold seed": self.fold_seed, "embedder": self.embedder}
        return settings

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes values and standard errors, float64 [2, N]."""
        method = replace(self.method, folder=scratch)
        values = _values(self.records, self.features, method, self.by, self.folds, self.fold_seed)
        np.save(out / _VALUES, np.stack([values.values, values.standard_errors]), allow_pickle=False)
        return {}


def value_records(
    records: pa.Table, features: npt.NDArray[np.float32], method: ValuationMethod, by: By, folds: int, seed: int
) -> RecordValues:
    """Values any labelled records with features float32 [N, D].

    Raises:
        UserError: fewer than two labels have two records each.
    """
    return _valued(records, _values(records, features, method, by, folds, seed), method, by, folds)


def _values(
    records: pa.Table, features: npt.NDArray[np.float32], method: ValuationMethod, by: By, folds: int, seed: int
) -> Values:
    points = check_features(features)
    labels = np.unique(records["completion"].to_pylist(), return_inverse=True)[1].astype(np.int64)
    groups = None if by == "record" else _groups(records, by)[1]
    if method.name == DATA_OOB:
        values = method.out_of_bag(points, labels)
        return values if groups is None else _means(values, groups)
    # By input, so that copies of a record are held out together and cannot vouch for each other.
    fold = assign_folds(records["input_id"].to_pylist(), labels, folds, seed)
    if len(np.unique(fold)) < 2:
        raise UserError(
            "no label stands with two different inputs, so that nothing can be held out",
            fix="value records of a closed set of labels",
        )
    return cross_validated_values(method.shapley, points, labels, fold, groups)


def _groups(records: pa.Table, by: By) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Returns the names of the sources or labels, and the index of each record's among them."""
    column = records["source" if by == "source" else "completion"].to_pylist()
    names, indices = np.unique(column, return_inverse=True)
    return names.tolist(), indices.astype(np.int64)


def _means(values: Values, groups: npt.NDArray[np.int64]) -> Values:
    """Averages the values of each group over its records with a value."""
    has_value = ~np.isnan(values.values)
    count = np.bincount(groups, has_value)
    sums = np.bincount(groups, np.where(has_value, values.values, 0))
    # The standard error of a mean of independent values: the root of the sum of squares, over the count.
    squares = np.bincount(groups, np.where(has_value, values.standard_errors, 0) ** 2)
    divisor = np.maximum(count, 1)
    mean, errors = (np.where(count > 0, part / divisor, np.nan) for part in (sums, np.sqrt(squares)))
    return Values(mean, errors)


def _valued(records: pa.Table, values: Values, method: ValuationMethod, by: By, folds: int) -> RecordValues:
    from scipy.special import ndtr

    labels = len(set(records["completion"].to_pylist()))
    # Out-of-bag values are accuracies, so that chance is harmless; games give 0 to a record that changes nothing.
    harmless = 1 / labels if method.name == DATA_OOB else 0.0
    above = values.values - harmless
    errors = np.where(np.isnan(values.standard_errors), np.inf, values.standard_errors)
    harmful = (errors > 0) & (np.nan_to_num(above, nan=0.0) + SURE * errors < 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = np.where(np.isfinite(errors) & ~np.isnan(above), ndtr(above / errors), 1.0)
        # Few draws that happen to agree have a standard error of 0, which says nothing about chance.
        weight = np.where(errors == 0, 1.0, weight)
    columns: dict[str, Any] = {
        "value": pa.array(values.values, from_pandas=True),
        "standard_error": pa.array(values.standard_errors, from_pandas=True),
        "harmful": harmful,
    }
    if by == "record":
        details = {"label": records["completion"], "input": inputs(records)}
        ids, origin = ({name: records[name] for name in names} for names in (("id", "input_id"), ("source", "line")))
        table = pa.table({**ids, **columns, "weight": weight, **details, **origin})
        order = [("value", "ascending"), ("id", "ascending")]
    else:
        names, indices = _groups(records, by)
        counts = np.bincount(indices)
        total = pa.array(values.values * counts, from_pandas=True)
        table = pa.table({"name": names, "records": counts, "total": total, **columns})
        order = [("value", "ascending"), ("name", "ascending")]
    parts = None if method.name == DATA_OOB else min(folds, records.num_rows)
    return RecordValues(table.sort_by(order).combine_chunks(), harmless, parts)


def _digest(features: npt.NDArray[np.float32]) -> str:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()


def check_by(by: str) -> By:
    """Checks the name of a unit that can be valued.

    Raises:
        UserError: there is no such unit.
    """
    units: Sequence[By] = ("record", "source", "label")
    for unit in units:
        if by == unit:
            return unit
    raise UserError(f"nothing is valued by `{by}`", where="--by", fix=f"one of {', '.join(units)}")
