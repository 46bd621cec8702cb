"""All that is known of why a record was answered, chosen or labelled as it was."""

from typing import Any

from posttrain.loop.config import Config
from posttrain.loop.explain.choice import labelled_by, learned_since, nearest_labelled, told_by_rounds
from posttrain.loop.explain.found import Found, find
from posttrain.loop.explain.influence import check_method, influence
from posttrain.loop.explain.learner import training_of
from posttrain.loop.history import carried_dataset
from posttrain.loop.registry import Registry
from posttrain.loop.turn import Turn
from posttrain.models.request import request
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace


def explain(
    workspace: Workspace, config: Config, text: str, *, method: str = "ekfac", among: int = 300, count: int = 5
) -> dict[str, Any]:
    """What there is to say of a record, by what it is.

    Args:
        workspace: the workspace.
        config: its config.
        text: the record's id, its input's, or the beginning of one.
        method: how influence is computed, of an evaluated record.
        among: training records that are looked at for it.
        count: records named of each kind.

    Returns:
        ``kind`` and ``record``. Of an ``evaluated`` record ``suite``, ``prediction`` and what
        `posttrain.loop.explain.influence.influence` found: ``towards`` and ``against`` the answer. Of one of the
        ``pool`` what ``rounds`` said of it and ``nearest`` labelled ones. Of a ``training`` record ``rounds``,
        ``since`` (the first round that learned from it) and ``labelled_by``.

    Raises:
        UserError: nothing has run yet, or the text names no record, or several; there is no such method, the champion
            has not been trained, or by an objective that learns no answers.
    """
    check_method(method)
    turn = Turn(workspace, config, 0, in_round=False)
    with workspace.lock():
        found = find(turn, text)
        told = {"kind": found.kind, "record": _shown(found.record)}
        if found.kind == "evaluated":
            return {**told, "suite": found.suite, **_evaluated(turn, found, method, among, count)}
        rounds = told_by_rounds(turn, found.record["input_id"])
        if found.kind == "training":
            since = learned_since(turn, found.record["input_id"])
            return {**told, "rounds": rounds, "since": since, "labelled_by": labelled_by(found.record)}
        nearest = nearest_labelled(turn, found.record, carried_dataset(workspace), count)
        return {**told, "rounds": rounds, "nearest": nearest}


def _evaluated(turn: Turn, found: Found, method: str, among: int, count: int) -> dict[str, Any]:
    if found.prediction is None:
        raise UserError(f"the suite `{found.suite}` measures a sample without this record", fix="posttrain eval --full")
    if not request(found.record):
        raise UserError("it is a text without an answer, and influence is told of answers")
    trained = training_of(turn, Registry(turn.workspace).in_service)
    if trained is None:
        raise UserError("the champion is the base model, which none of your records has taught", fix="posttrain run")
    said, expected = found.prediction["predicted"], found.prediction["expected"]
    wrong = expected is not None and said != expected and not found.prediction["score"] >= 1
    instead = expected if wrong else None
    of = influence(turn, trained, found.record, said, instead, method, among)
    rows = of.table.to_pylist()
    return {
        "prediction": found.prediction,
        "instead": instead,
        "method": method,
        "parameters": of.parameters,
        "looked_at": len(rows),
        "training": of.training,
        "towards": [row for row in rows if row["influence"] > 0][:count],
        "against": [row for row in reversed(rows) if row["influence"] < 0][:count],
    }


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    text = " / ".join(turn["content"] for turn in request(record))
    return {**{name: record[name] for name in ("id", "input_id", "completion", "source", "line")}, "input": text}
