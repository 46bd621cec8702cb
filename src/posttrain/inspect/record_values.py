"""What labelled records, or whole sources or labels of them, are worth to each other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.attribution.valuation import DATA_OOB, ValuationMethod, cross_validated_values
from posttrain.attribution.values import Values
from posttrain.data.labels.label_noise import assign_folds as dealt
from posttrain.inspect.labelled_records import embedded, inputs, labelled_dataset
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.stage import Stage
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

By = Literal["record", "source", "label"]

SURE = 2.0
"""Standard errors by which a value must be below the harmless for the record to be surely harmful."""

_VALUES = "values.npy"


@dataclass(frozen=True)
class Valued:
    """Values, the worst first; those without a value last.

    Attributes:
        table: for records ``id, input_id, value, standard_error, harmful, weight, label, input, source, line``; for
            sources and labels ``name, records, total, value, standard_error, harmful``, where value and standard error
            are of one record on average. ``harmful`` says that the value lies `SURE` standard errors below
            ``harmless``; ``weight`` is the probability that it lies above, if it errs as a normal number does, and 1
            where nothing is known of its error.
        harmless: the value of a record that changes nothing.
        evaluations: as of `posttrain.attribution.values.Values`.
        folds: parts of the records that were held out in turn; None where nothing was.
    """

    table: pa.Table
    harmless: float
    evaluations: int
    folds: int | None

    @property
    def harmful(self) -> pa.Table:
        """The rows that are surely harmful."""
        return self.table.filter(self.table["harmful"])

    @property
    def unknown(self) -> int:
        """How many have no value."""
        return int(self.table["value"].null_count)


def value_labelled(
    workspace: Workspace, config: Config, method: ValuationMethod, by: By, folds: int, embedder: str, seed: int
) -> Valued:
    """What the records that the loop has labels of are worth; work that was done before is found again.

    They are held against each other, never against test records: a gate that is asked about a training set that its
    own records have shaped says too much.

    Args:
        workspace: the workspace.
        config: its config.
        method: how they are valued.
        by: what is valued.
        folds: parts that are held out in turn.
        embedder: what makes features, as `posttrain.inspect.labelled_records.embedded` takes it.
        seed: of the parts.

    Raises:
        UserError: nothing has been labelled yet, or no two labels stand with two records each.
    """
    context = RoundContext(workspace, config, 0, in_round=False)
    with workspace.lock():
        dataset = labelled_dataset(context)
        records = context.dataset(dataset).records
        features = embedded(context, dataset, embedder)

        stage = ValueDataset(dataset, records, features, method, by, folds, embedder, seed)
        artifact = context.run(stage)
        numbers = np.load(context.path(artifact.id) / _VALUES, allow_pickle=False)
    return _valued(records, Values(numbers[0], numbers[1], artifact.meta["evaluations"]), method, by, folds)


@dataclass(frozen=True)
class ValueDataset(Stage):
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
    version = 2
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """The records and their features."""
        return {"dataset": self.dataset, "features": _digest(self.features)}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """The method and the folds."""
        method = self.method
        settings = {"method": method.name, "learner": method.learner, "draws": method.draws, "seed": method.seed}
        settings |= {"by": self.by, "folds": self.folds, "fold seed": self.fold_seed, "embedder": self.embedder}
        return settings

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Write values and standard errors, float64 [2, N]."""
        method = replace(self.method, folder=scratch)
        values = _values(self.records, self.features, method, self.by, self.folds, self.fold_seed)
        np.save(out / _VALUES, np.stack([values.values, values.standard_errors]), allow_pickle=False)
        return {"evaluations": values.evaluations}


def value_records(
    records: pa.Table, features: npt.NDArray[np.float32], method: ValuationMethod, by: By, folds: int, seed: int
) -> Valued:
    """The same of any labelled records, with features [N, D].

    Raises:
        UserError: no two labels stand with two records each.
    """
    return _valued(records, _values(records, features, method, by, folds, seed), method, by, folds)


def _values(
    records: pa.Table, features: npt.NDArray[np.float32], method: ValuationMethod, by: By, folds: int, seed: int
) -> Values:
    answers = records["completion"].to_pylist()
    groups = None if by == "record" else _groups(records, by)[1]
    if method.name == DATA_OOB:
        values = method.out_of_bag(features, answers)
        return values if groups is None else _means(values, groups)
    labels = np.unique(answers, return_inverse=True)[1].astype(np.int64)
    fold = dealt(records["input_id"].to_pylist(), labels, folds, seed)
    if len(np.unique(fold)) < 2:
        raise UserError(
            "no label stands with two different inputs, so that nothing can be held out",
            fix="value records of a closed set of labels",
        )
    return cross_validated_values(method, features, labels, fold, groups)


def _groups(records: pa.Table, by: By) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The names of the sources or labels, and the place of each record's among them."""
    column = records["source" if by == "source" else "completion"].to_pylist()
    names, places = np.unique(column, return_inverse=True)
    return names.tolist(), places.astype(np.int64)


def _means(values: Values, groups: npt.NDArray[np.int64]) -> Values:
    """Of each group, over the records that have a value; standard errors as if the records' were independent."""
    known = ~np.isnan(values.values)
    count = np.bincount(groups, known)
    sums = np.bincount(groups, np.where(known, values.values, 0))
    squares = np.bincount(groups, np.where(known, values.standard_errors, 0) ** 2)
    there = np.maximum(count, 1)
    mean, errors = (np.where(count > 0, part / there, np.nan) for part in (sums, np.sqrt(squares)))
    return Values(mean, errors, values.evaluations)


def _valued(records: pa.Table, values: Values, method: ValuationMethod, by: By, folds: int) -> Valued:
    from scipy.special import ndtr

    labels = len(set(records["completion"].to_pylist()))
    harmless = 1 / labels if method.name == DATA_OOB else 0.0
    above = values.values - harmless
    errors = np.where(np.isnan(values.standard_errors), np.inf, values.standard_errors)
    harmful = (errors > 0) & (np.nan_to_num(above, nan=0.0) + SURE * errors < 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = np.where(np.isfinite(errors) & ~np.isnan(above), ndtr(above / errors), 1.0)
        weight = np.where(errors == 0, 1.0, weight)  # a few that are alike by chance say nothing of chance
    judged: dict[str, Any] = {
        "value": pa.array(values.values, from_pandas=True),
        "standard_error": pa.array(values.standard_errors, from_pandas=True),
        "harmful": harmful,
    }
    if by == "record":
        details = {"label": records["completion"], "input": inputs(records)}
        place = {name: records[name] for name in ("source", "line")}
        table = pa.table(
            {**{name: records[name] for name in ("id", "input_id")}, **judged, "weight": weight, **details, **place}
        )
        order = [("value", "ascending"), ("id", "ascending")]
    else:
        names, places = _groups(records, by)
        counts = np.bincount(places)
        total = pa.array(values.values * counts, from_pandas=True)
        table = pa.table({"name": names, "records": counts, "total": total, **judged})
        order = [("value", "ascending"), ("name", "ascending")]
    parts = None if method.name == DATA_OOB else min(folds, records.num_rows)
    return Valued(table.sort_by(order).combine_chunks(), harmless, values.evaluations, parts)


def _digest(features: npt.NDArray[np.float32]) -> str:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()


def check_by(by: str) -> By:
    """Raise a UserError unless there is such a thing to value."""
    known: Sequence[By] = ("record", "source", "label")
    for one in known:
        if by == one:
            return one
    raise UserError(f"nothing is valued by `{by}`", where="--by", fix=f"one of {', '.join(known)}")
