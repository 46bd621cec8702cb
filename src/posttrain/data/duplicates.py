"""Records that say the same, records that contradict each other, and records that miss their answer."""

import pyarrow as pa

from posttrain.data.flow import Work
from posttrain.data.steps.step import Outcome, Rejection, part, places


def exact_duplicates(table: pa.Table) -> Outcome:
    """Of records with equal normalised content the first stays."""
    where = places(table)
    first: dict[str, int] = {}
    rejections: dict[int, Rejection] = {}
    for row, identity in enumerate(table["id"].to_pylist()):
        kept = first.setdefault(identity, row)
        if kept != row:
            rejections[row] = Rejection("exact duplicate", f"the same as {where[kept]}")
    return part(table, "duplicates", rejections)


def conflicting_answers(table: pa.Table) -> Outcome:
    """Of records with equal inputs and different answers none stays: no one can say which answer is true.

    Meant for tasks with a closed label set; in open-ended tasks one input may well have several good answers.
    Preference pairs and records without an answer pass.
    """
    where = places(table)
    by_input: dict[str, list[int]] = {}
    answers = table["completion"].to_pylist()
    worse = table["rejected"].to_pylist()
    for row, identity in enumerate(table["input_id"].to_pylist()):
        if answers[row] is not None and worse[row] is None:
            by_input.setdefault(identity, []).append(row)
    rejections: dict[int, Rejection] = {}
    for rows in by_input.values():
        if len({answers[row] for row in rows}) > 1:
            detail = "; ".join(f"`{answers[row]}` at {where[row]}" for row in rows)
            rejections.update((row, Rejection("conflicting labels", detail)) for row in rows)
    return part(table, "conflicts", rejections)


def unanswered(table: pa.Table) -> Outcome:
    """Prompts without an answer go; plain text needs none."""
    rejections = {
        row: Rejection("no answer", "the answer is empty")
        for row, (answer, text) in enumerate(
            zip(table["completion"].to_pylist(), table["text"].to_pylist(), strict=True)
        )
        if answer is None and text is None
    }
    return part(table, "answers", rejections)


def already_labelled(labelled: pa.Table) -> Work:
    """A step that takes out the inputs that ``labelled`` holds."""
    known = dict(zip(labelled["input_id"].to_pylist(), places(labelled), strict=True))

    def step(table: pa.Table) -> Outcome:
        rejections = {
            row: Rejection("already labelled", f"the same input as {known[identity]}")
            for row, identity in enumerate(table["input_id"].to_pylist())
            if identity in known
        }
        return part(table, "labelled", rejections)

    return step
