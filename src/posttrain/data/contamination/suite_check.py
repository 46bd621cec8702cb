"""Training records whose input is that of a record that models are measured on: found always, as that costs little."""

from collections.abc import Collection, Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.steps.step import Step, places
from posttrain.store.errors import UserError


def refuse_equal_inputs(
    training: pa.Table,
    suites: Mapping[str, pa.Table],
    steps: Iterable[Step],
    held_out: Collection[str] = (),
    *,
    beside: pa.Table,
) -> None:
    """Go on only if there is something to measure on that no model learns from.

    Args:
        training: ``input_id``, ``source`` and ``line`` of the records to learn from, before `decontaminate`.
        suites: RECORD table of each suite by its name.
        steps: `decontaminate`, where it is among them, takes out what only a part of a suite shares.
        held_out: names of suites that are what a version holds out: the files it was made of may well be read again,
            and the step takes out all that the suite shares.
        beside: ``input_id`` of records of the same files that are held out or have left.

    Raises:
        UserError: all inputs of a suite stand in the files, or some are among the training records and no step takes
            them out.
    """
    cleaned = any(isinstance(step, Decontaminate) for step in steps)
    for name, suite in suites.items():
        inside = compute.is_in(suite["input_id"], value_set=training["input_id"].combine_chunks())
        shared = suite.filter(inside)
        if cleaned and name in held_out:
            continue
        elsewhere = compute.is_in(suite["input_id"], value_set=beside["input_id"].combine_chunks())
        if shared.num_rows and compute.sum(compute.or_(inside, elsewhere)).as_py() == suite.num_rows:
            raise wholly_shared(name, suite.num_rows)
        if shared.num_rows and not cleaned:
            raise shared_inputs(training, shared, name)


def shared_inputs(training: pa.Table, measured: pa.Table, name: str) -> UserError:
    """The error for training records with inputs of ``measured``, of which there is one at least.

    Args:
        training: ``input_id``, ``source`` and ``line``.
        measured: such a table of the records that models are measured on.
        name: what they are called.
    """
    giving = training.filter(compute.is_in(training["input_id"], value_set=measured["input_id"].combine_chunks()))
    first = giving.slice(0, 1)
    other = measured.filter(compute.equal(measured["input_id"], first["input_id"][0])).slice(0, 1)
    count = giving.num_rows
    records = "1 training record has an input" if count == 1 else f"{count:,} training records have inputs"
    message = f"{records} that models are measured on, the first: {places(first)[0]} and {places(other)[0]}"
    return UserError(message, where=name, fix="list the step `decontaminate`, which takes them from training")


def wholly_shared(name: str, count: int) -> UserError:
    """The error for a suite of which nothing is left to measure on."""
    fix = "measure on records that no model has learned from, or leave those files out"
    return UserError(f"all {count:,} records of the suite stand in the training files", where=name, fix=fix)
