"""Which training records made the champion answer a record as it does."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.loop.explain.choice import similarities
from posttrain.loop.explain.learner import Trained, encoded, load
from posttrain.loop.labelled_records import inputs
from posttrain.loop.turn import Turn, task_key
from posttrain.models.request import request
from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean

if TYPE_CHECKING:
    from posttrain.models.chat import Encoded
    from posttrain.select.value.influence.learner import Learner
    from posttrain.select.value.influence.scores import Scores

_SCORES = "influence.parquet"
_DIMENSIONS = 4096
_DAMPING = 0.1  # of the mean eigenvalue, as R. Grosse et al. 2023 (arXiv:2308.03296, section 2.1)
_LOOKED_AT = 16  # records that tell the mean eigenvalue

METHODS = ("ekfac", "conjugate_gradient", "lissa", "arnoldi", "tracin", "trak", "less")


@dataclass(frozen=True)
class Influence:
    """What each training record that was looked at did to an answer.

    Attributes:
        table: ``id, influence, share, label, input, source, line``, what pushed most towards the answer first;
            ``share`` is the influence over the sum of all sizes.
        parameters: which of the model's count.
        training: records that the model was trained on.
    """

    table: pa.Table
    parameters: str
    training: int


def check_method(name: str) -> None:
    """Raise a UserError unless there is such a method."""
    if name not in METHODS:
        raise UserError(f"no method `{name}`; {did_you_mean(name, METHODS)}", where="--method")


def influence(
    turn: Turn, trained: Trained, record: Mapping[str, Any], answer: str, instead: str | None, method: str, among: int
) -> Influence:
    """What the training records did to a model's answer to a record; computed once.

    The score of a training record is to first order what leaving it out would take from the log-likelihood of the
    answer, less what it would take from that of the other answer. The unit is nats by the methods that invert the
    curvature, though the damping decides the size, so that only shares and order mean something; `tracin` and `less`
    are of the trained weights alone, as checkpoints of a finished training are not kept, and `trak` of one model.
    `less` takes Adam's moments that these weights would come to, and of two answers the difference of two cosines.

    Args:
        turn: none of a round.
        trained: the model and its training.
        record: a row of RECORD.
        answer: what the model said.
        instead: another answer; None: none.
        method: one of `METHODS`.
        among: training records that are looked at, those whose inputs are most like the record's.
    """
    dataset = turn.dataset(trained.dataset).records

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        from posttrain.select.value.influence.causal import causal_learner, encode

        rows = np.arange(dataset.num_rows)
        if dataset.num_rows > among:
            rows = np.sort(np.argsort(-similarities(turn, dict(record), trained.dataset), kind="stable")[:among])
        lm, parameters = load(turn, trained)
        train = encoded(lm, trained, dataset.take(pa.array(rows)))
        prompt = request(record)
        test = [encode(lm, prompt, said) for said in (answer, instead) if said is not None]
        # Records of like length stand together, so that little is filled up.
        order = np.argsort([len(one.ids) for one in train], kind="stable")
        found = _scores(causal_learner(lm), [train[place] for place in order], test, method, trained, scratch)
        ids = dataset["id"].take(pa.array(rows[order]))
        towards = found.scores[:, 0] - (found.scores[:, 1] if instead is not None else 0)
        parquet.write_table(pa.table({"id": ids, "influence": towards}), out / _SCORES)
        left = None if found.residuals is None else float(found.residuals.max())
        return {"parameters": parameters, "evaluations": found.evaluations, "residual": left}

    # The prompt is what counts of the record, and the answers.
    asked = json.dumps(request(record), ensure_ascii=False)
    settings = {"method": method, "among": among, "asked": asked, "answer": answer, "instead": instead}
    from_base = {"model": trained.model, "source": trained.run.inputs["source"], "dataset": trained.dataset}
    made = turn.stage("influence", "influence", from_base, settings | task_key(turn.config), work, seeded=False)
    scores = parquet.read_table(turn.path(made.id) / _SCORES)
    return Influence(_with_records(scores, dataset), made.meta["parameters"], dataset.num_rows)


def _with_records(scores: pa.Table, dataset: pa.Table) -> pa.Table:
    row_of = {id: row for row, id in enumerate(dataset["id"].to_pylist())}
    records = dataset.take(pa.array([row_of[id] for id in scores["id"].to_pylist()], pa.int64()))
    size = float(np.abs(scores["influence"].to_numpy()).sum())
    shares = scores["influence"].to_numpy() / (size or 1)
    columns = {"share": shares, "label": records["completion"], "input": inputs(records)}
    columns |= {name: records[name] for name in ("source", "line")}
    table = pa.table({**{name: scores[name] for name in scores.column_names}, **columns})
    return table.sort_by([("influence", "descending"), ("id", "ascending")]).combine_chunks()


def _scores(
    learner: "Learner", train: "list[Encoded]", test: "list[Encoded]", method: str, trained: Trained, scratch: Path
) -> "Scores":
    from posttrain.select.value.influence.checkpoints import AdamMoments, Checkpoint
    from posttrain.select.value.influence.curvature import Curvature
    from posttrain.select.value.influence.functions import influence_functions
    from posttrain.select.value.influence.less import less
    from posttrain.select.value.influence.projection import Projection
    from posttrain.select.value.influence.tracin import tracin
    from posttrain.select.value.influence.trak import trak

    if method == "tracin":
        point = Checkpoint(learner.parameters, trained.train["learning_rate"])
        return tracin(learner, [point], train, test, projection=Projection(_DIMENSIONS), folder=scratch)
    if method == "less":
        settled = AdamMoments.settled(learner, train)
        point = Checkpoint(learner.parameters, trained.train["learning_rate"], settled)
        return less(learner, [point], train, test, projection=Projection(_DIMENSIONS), folder=scratch)
    if method == "trak":
        # As many dimensions as records would fit all of them, so fewer.
        narrow = Projection(max(8, min(_DIMENSIONS, len(train) // 2)))
        return trak([learner], train, test, projection=narrow, damping=1e-6, folder=scratch)
    spread = np.linspace(0, len(train) - 1, min(_LOOKED_AT, len(train))).astype(int)
    mean = mean_eigenvalue(Curvature(learner, [train[row] for row in spread]))
    # Where the model is sure of everything the curvature is next to nothing, but no damping would divide by it.
    damping = max(_DAMPING * mean, float(np.finfo(np.float32).tiny))
    return influence_functions(learner, train, test, damping=damping, solver=_SOLVERS[method](), folder=scratch)


def mean_eigenvalue(curvature: Any, seed: int = 0) -> float:
    """The trace of a curvature over its size, from one random vector of signs (M. F. Hutchinson 1990)."""
    import torch

    learner = curvature.learner
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (learner.size, 1), generator=generator).to(learner.dtype).to(learner.device) * 2 - 1
    along = float((signs.double() * curvature.product(signs).double()).sum())
    return along / int(learner.size)


def _ekfac() -> Any:
    from posttrain.select.value.influence.inverse.ekfac import Ekfac

    return Ekfac()


def _conjugate_gradient() -> Any:
    from posttrain.select.value.influence.inverse.conjugate_gradient import ConjugateGradient

    return ConjugateGradient(tolerance=1e-2, steps=50)


def _lissa() -> Any:
    from posttrain.select.value.influence.inverse.lissa import Lissa

    return Lissa(steps=100)


def _arnoldi() -> Any:
    from posttrain.select.value.influence.inverse.arnoldi import Arnoldi

    return Arnoldi(steps=50)


_SOLVERS: Mapping[str, Callable[[], Any]] = {
    "ekfac": _ekfac,
    "conjugate_gradient": _conjugate_gradient,
    "lissa": _lissa,
    "arnoldi": _arnoldi,
}
