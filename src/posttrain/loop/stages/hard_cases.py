"""The test records that the champion finds hard, by the kinds that the config names."""

from dataclasses import asdict

import pyarrow as pa

from posttrain.evaluate.artifact import read_evaluation
from posttrain.loop.history import finished_rounds
from posttrain.loop.stages.evaluation import evaluate
from posttrain.loop.turn import Turn
from posttrain.select.hard_cases.kinds import Evaluations, HardCase, hard_cases
from posttrain.store.artifacts import Artifact


def others_evaluated(turn: Turn, champion: str, test: Artifact) -> dict[str, str]:
    """Evaluations of the models that the kinds of hard cases compare the champion with, by role.

    ``previous`` is the champion that this one replaced, for regressions; ``other`` the model that it was last judged
    against, a refused candidate among them, for disagreement. They follow from rounds that are done, so that a killed
    round finds the same.
    """
    kinds = turn.config.select.hard_cases
    models: dict[str, str] = {}
    for entry in finished_rounds(turn.workspace):
        if champion == entry.candidate and entry.champion_before not in (None, champion):
            models["previous"] = models["other"] = str(entry.champion_before)
        elif champion == entry.champion_before and entry.candidate not in (None, champion):
            models["other"] = str(entry.candidate)
    wanted = {"previous": "regressions" in kinds, "other": "disagreement" in kinds}
    return {role: evaluate(turn, model, test).id for role, model in models.items() if wanted[role]}


def hard_test_cases(
    turn: Turn, evaluation: str, others: dict[str, str], records: pa.Table
) -> tuple[list[HardCase], pa.Table]:
    """The hard cases of the first suite, and their records, in one order.

    Args:
        turn: the round.
        evaluation: of the champion.
        others: from `others_evaluated`.
        records: RECORD table of the test set.
    """
    ours = next(iter(read_evaluation(turn.path(evaluation)).values()))
    theirs = {role: read_evaluation(turn.path(id))[ours.name].predictions for role, id in others.items()}
    found = hard_cases(turn.config.select.hard_cases, Evaluations(ours.predictions, **theirs))
    row_of = {id: row for row, id in enumerate(records["id"].to_pylist())}
    cases = [case for case in found if case.id in row_of]
    return cases, records.take(pa.array([row_of[case.id] for case in cases], pa.int64()))


def as_rows(cases: list[HardCase]) -> list[dict[str, object]]:
    """Hard cases as JSON holds them."""
    return [asdict(case) for case in cases]


def from_rows(rows: list[dict[str, object]]) -> list[HardCase]:
    """What `as_rows` made of hard cases, read again."""
    return [HardCase(**{**row, "kinds": tuple(row["kinds"])}) for row in rows]  # type: ignore[arg-type]
