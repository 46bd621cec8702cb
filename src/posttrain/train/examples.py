"""Records as token ids, and the order in which the trainer meets them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.models.chat import Encoded
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Unit
from posttrain.models.request import request
from posttrain.store.errors import UserError


def encode(
    lm: LanguageModel, records: pa.Table, max_length: int, *, pairs: bool = False
) -> tuple[list[Unit], list[str]]:
    """Token ids of every labelled record; plain text without an answer is learned as a whole.

    Args:
        pairs: whether the rejected answers are wanted too.

    Returns:
        Units of one sequence, or of the chosen and the rejected one, in the records' order, and the ids of the records
        that were cut to ``max_length``.

    Raises:
        UserError: if a record has no answer, its answer alone is longer than ``max_length``, or it is no pair of two
            different answers where one is wanted.
    """
    units: list[Unit] = []
    cut: list[str] = []
    for record in records.select(["id", "prompt", "completion", "rejected", "text"]).to_pylist():
        unit = _pair(lm, record) if pairs else [_sequence(lm, record)]
        if max(len(sequence.ids) for sequence in unit) > max_length:
            cut.append(record["id"])
            unit = [_cut(sequence, record, max_length) for sequence in unit]
        units.append(unit)
    return units, cut


def epoch_order(count: int, batch_size: int, seed: int | None, epoch: int) -> list[list[int]]:
    """Batches of row numbers for one pass over ``count`` rows: the same seed and epoch give the same order.

    Without a seed the rows keep their order.
    """
    rows = np.arange(count) if seed is None else np.random.default_rng([seed, epoch]).permutation(count)
    return [rows[start : start + batch_size].tolist() for start in range(0, count, batch_size)]


def _sequence(lm: LanguageModel, record: Mapping[str, Any]) -> Encoded:
    prompt = request(record)
    if not prompt or (record["prompt"] and record["completion"] is None):
        raise UserError(f"record {record['id']}: it has no answer and no text to learn")
    if record["completion"] is not None:
        return lm.encode(prompt, record["completion"])
    ids = lm.chat.tokenizer(record["text"])["input_ids"] + [lm.tokenizer.eos_token_id]
    return Encoded(ids, [True] * len(ids))


def _pair(lm: LanguageModel, record: Mapping[str, Any]) -> Unit:
    prompt = request(record)
    if not prompt or record["completion"] is None or record["rejected"] is None:
        raise UserError(f"record {record['id']}: it is no pair of a chosen and a rejected answer")
    chosen, rejected = (lm.encode(prompt, record[side]) for side in ("completion", "rejected"))
    if chosen.ids == rejected.ids:
        raise UserError(f"record {record['id']}: its chosen and its rejected answer are the same")
    asked = len(lm.prompt_ids(prompt))
    return [Encoded(one.ids, [False] * asked + one.supervised[asked:]) for one in (chosen, rejected)]


def _cut(sequence: Encoded, record: Mapping[str, Any], max_length: int) -> Encoded:
    """The last ``max_length`` tokens."""
    if len(sequence.ids) <= max_length:
        return sequence
    short = Encoded(sequence.ids[-max_length:], sequence.supervised[-max_length:])
    if all(short.supervised) and record["completion"] is not None:
        raise UserError(
            f"record {record['id']}: its answer leaves no room for its prompt in {max_length} tokens",
            where="train.max_length",
        )
    return short
