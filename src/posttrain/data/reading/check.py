"""Everything that is wrong with a file, found in one reading."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from posttrain.data.reading.paths import Place
from posttrain.data.reading.problem import Problem, unknown_label
from posttrain.data.reading.tables import scan

_LINE_BITS = 40


def check(
    path: str | Path | Place,
    columns: Mapping[str, str] | None = None,
    labels: Sequence[str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
) -> list[Problem]:
    """All of :func:`problems` in the order of the file's lines; never stops at the first."""
    return list(problems(path, columns, labels, name=name, answers=answers))


def problems(
    path: str | Path | Place,
    columns: Mapping[str, str] | None = None,
    labels: Sequence[str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
) -> Iterator[Problem]:
    """Each problem of a file as it is found, in about 200 bytes of memory a record.

    ``labels`` is None for open-ended answers, and for a pool, whose answers are hidden.

    Besides what :func:`posttrain.data.reading.tables.read` refuses or leaves out: answers outside ``labels``, records
    that
    stand in the file twice (the later one is the problem) and, where ``labels`` is given, inputs with two answers.
    The last two, and what is left out, do not block: steps deal with them when a version is built.
    """
    seen: dict[int, int] = {}
    answered: dict[int, int] = {}
    known = {label: number for number, label in enumerate(labels)} if labels is not None else None
    met = list(labels or ())
    numbers = dict(known or {})
    for found in scan(path, columns, name=name, answers=answers):
        if isinstance(found, Problem):
            yield found
            continue
        file, line, answer = found["source"], found["line"], found["completion"]
        if known is not None and answer is not None and answer not in known:
            yield unknown_label(answer, known, file, line)
        distinct = len(seen)
        first = seen.setdefault(int(found["id"], 16), line)
        if len(seen) == distinct:
            message = f"the same record as line {first}"
            yield Problem(file, line, "duplicate", message, "only the first is used", blocking=False)
            continue
        if known is None or answer is None:
            continue
        number = numbers.setdefault(answer, len(met))
        if number == len(met):
            met.append(answer)
        entry = answered.setdefault(int(found["input_id"], 16), number << _LINE_BITS | line)
        other, where = met[entry >> _LINE_BITS], entry & ((1 << _LINE_BITS) - 1)
        if other != answer:
            message = f"the same input is `{answer}` here and `{other}` on line {where}"
            yield Problem(file, line, "conflicting labels", message, "keep the right one", blocking=False)
