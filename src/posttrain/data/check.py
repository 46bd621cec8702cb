"""Everything that is wrong with a file, found in one reading."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.data.problem import Problem, unknown_label
from posttrain.data.read import scan


def check(
    path: Path,
    columns: Mapping[str, str] | None = None,
    labels: Sequence[str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
) -> list[Problem]:
    """All problems of a file in the order of its lines; never stops at the first.

    ``labels`` is None for open-ended answers, and for a pool, whose answers are hidden.

    Besides what :func:`posttrain.data.read.read` refuses: answers outside ``labels``, records that stand in
    the file twice (the later one is the problem) and, where ``labels`` is given, inputs with two answers.
    """
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    answered: dict[str, tuple[str, int]] = {}
    known = set(labels) if labels is not None else None
    for found in scan(path, columns, name=name, answers=answers):
        if isinstance(found, Problem):
            problems.append(found)
            continue
        file, line, answer = found["source"], found["line"], found["completion"]
        if known is not None and answer is not None and answer not in known:
            problems.append(unknown_label(answer, labels or (), file, line))
        if found["id"] in seen:
            message = f"the same record as line {seen[found['id']]}"
            problems.append(Problem(file, line, "duplicate", message, "only the first is used"))
            continue
        seen[found["id"]] = line
        if known is None or answer is None:
            continue
        other, where = answered.setdefault(found["input_id"], (answer, line))
        if other != answer:
            message = f"the same input is `{answer}` here and `{other}` on line {where}"
            problems.append(Problem(file, line, "conflicting labels", message, "keep the right one"))
    return problems
