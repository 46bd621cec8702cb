"""Records as token ids, and the order in which the trainer meets them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from posttrain.models.chat import Encoded
from posttrain.models.language_model import LanguageModel
from posttrain.models.request import request
from posttrain.store.errors import UserError

_BUCKET_BATCHES = 16
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """A padded micro-batch, its shared beginning taken out.

    Args:
        prefix: int64 [P], the tokens that all rows begin with; none of them is supervised.
        inputs: int64 [B, T], what each row goes on with; its last token is only predicted, so it is not here.
        mask: int64 [B, P + T], 0 where there is padding.
        targets: int64 [B, T], the token after each input, and -100 where it is not supervised.
        count: supervised tokens.
    """

    prefix: Tensor
    inputs: Tensor
    mask: Tensor
    targets: Tensor
    count: int


def encode(lm: LanguageModel, records: pa.Table, max_length: int) -> tuple[list[Encoded], list[str]]:
    """Token ids of every labelled record; plain text without an answer is learned as a whole.

    Returns:
        The examples in the records' order, and the ids of the records that were cut to ``max_length``.

    Raises:
        UserError: if a record has no answer, or its answer alone is longer than ``max_length``.
    """
    examples: list[Encoded] = []
    cut: list[str] = []
    for record in records.select(["id", "prompt", "completion", "text"]).to_pylist():
        prompt = request(record)
        if not prompt or (record["prompt"] and record["completion"] is None):
            raise UserError(f"record {record['id']}: it has no answer and no text to learn")
        if record["completion"] is None:
            ids = lm.chat.tokenizer(record["text"])["input_ids"] + [lm.tokenizer.eos_token_id]
            example = Encoded(ids, [True] * len(ids))
        else:
            example = lm.encode(prompt, record["completion"])
        if len(example.ids) > max_length:
            cut.append(record["id"])
            example = Encoded(example.ids[-max_length:], example.supervised[-max_length:])
            if all(example.supervised) and record["completion"] is not None:
                raise UserError(
                    f"record {record['id']}: its answer leaves no room for its prompt in {max_length} tokens",
                    where="train.max_length",
                )
        examples.append(example)
    return examples, cut


def epoch_order(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of row numbers for one pass, similar lengths together so that little is padded.

    Rows are shuffled, sorted by length within runs of a few batches, cut into batches, and the batches shuffled:
    the same seed and epoch give the same order.
    """
    rng = np.random.default_rng([seed, epoch])
    rows = rng.permutation(len(lengths)).tolist()
    run = batch_size * _BUCKET_BATCHES
    batches = []
    for start in range(0, len(rows), run):
        bucket = sorted(rows[start : start + run], key=lambda row: lengths[row])
        batches += [bucket[first : first + batch_size] for first in range(0, len(bucket), batch_size)]
    return [batches[position] for position in rng.permutation(len(batches))]


def micro_batches(examples: Sequence[Encoded], rows: Sequence[int], tokens: int, lm: LanguageModel) -> Iterator[Batch]:
    """Cut one optimiser step's rows into padded batches of at most ``tokens`` tokens (at least one row each)."""
    waiting: list[int] = []
    for row in sorted(rows, key=lambda row: len(examples[row].ids)):
        if waiting and (len(waiting) + 1) * len(examples[row].ids) > tokens:
            yield _pad([examples[row] for row in waiting], lm)
            waiting = []
        waiting.append(row)
    if waiting:
        yield _pad([examples[row] for row in waiting], lm)


def _pad(examples: Sequence[Encoded], lm: LanguageModel) -> Batch:
    shared = _shared_prefix(examples)
    lengths = torch.tensor([len(example.ids) - shared - 1 for example in examples])
    shape = len(examples), int(lengths.max())
    inputs = torch.full(shape, lm.tokenizer.pad_token_id or 0)
    targets = torch.full(shape, IGNORED)
    for row, example in enumerate(examples):
        length = lengths[row]
        inputs[row, :length] = torch.tensor(example.ids[shared:-1])
        after = torch.tensor(example.ids[shared + 1 :])
        targets[row, :length] = after.where(torch.tensor(example.supervised[shared + 1 :]), IGNORED)
    mask = (torch.arange(-shared, shape[1])[None] < lengths[:, None]).long()
    prefix = torch.tensor(examples[0].ids[:shared], dtype=torch.long)
    count = int((targets != IGNORED).sum())
    device = lm.device
    return Batch(prefix.to(device), inputs.to(device), mask.to(device), targets.to(device), count)


def _shared_prefix(examples: Sequence[Encoded]) -> int:
    """Tokens that all rows begin with, up to and without the last that predicts a supervised one in any row."""
    first_supervised = min(example.supervised.index(True) for example in examples)
    low, high = min(example.ids for example in examples), max(example.ids for example in examples)
    shared = 0  # in lexicographic order the extremes differ first
    while shared < min(first_supervised, len(low), len(high)) - 1 and low[shared] == high[shared]:
        shared += 1
    return shared
