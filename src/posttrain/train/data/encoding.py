"""Encodes records as token ids; needs a tokenizer with its template and the task, but no model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from posttrain.models.chat import ChatTemplate, RefusedTurns, TokenizedExample
from posttrain.models.task import TaskConfig, record_turns
from posttrain.store.errors import UserError, shorten, suggest
from posttrain.train.data.config import RecordShape

if TYPE_CHECKING:  # torch comes with it, and processes that only tokenise need none
    from posttrain.models.packing import Unit

TOKEN_COLUMNS = ["id", "prompt", "completion", "rejected", "text", "meta"]
"""The columns that decide a record's token ids."""
SOURCE_COLUMNS = ["source", "line"]
"""The columns of a record's origin, which errors name."""


class ExampleTooLong(UserError):
    """A record's answer leaves no room for its prompt.

    Args:
        others: number of other records with the same fault.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, others: int = 0) -> None:
        super().__init__(f"{what}, and {others} more like it" if others else what, where=where, fix=fix)
        self.alone, self.others = what, others

    def and_others(self, count: int) -> "ExampleTooLong":
        """Returns the error with ``count`` more records."""
        return ExampleTooLong(self.alone, where=self.where, fix=self.fix, others=self.others + count)


class ChatEncoder(Protocol):
    """Renders prompts and answers: a `LanguageModel`, or an `Encoder`, which has no weights."""

    @property
    def chat(self) -> ChatTemplate:
        """The tokenizer and its template."""

    @property
    def task(self) -> TaskConfig:
        """The task of the prompts."""


@dataclass(frozen=True)
class Encoder:
    """Template and task, which turn records into token ids; can be sent to another process."""

    chat: ChatTemplate
    task: TaskConfig


def load_encoder(source: str, task: TaskConfig) -> Encoder:
    """Loads the encoder of a model that ``posttrain.models.sources.locate`` names, without fetching its weights.

    Raises:
        UserError: config or tokenizer cannot be read, or nothing names a stop token.
    """
    from posttrain.models.language_model import stop_tokens
    from posttrain.models.loading import load_generation_config
    from posttrain.models.shape import read_chat, read_config
    from posttrain.models.sources import TINY_MODEL

    chat = read_chat(source, read_config(source))
    # Looking for a generation config there would end in an error.
    if source == TINY_MODEL or source.endswith(".gguf"):  # they have no other stop tokens than their config's
        return Encoder(chat, task)
    generation = load_generation_config(source)
    if generation is None:
        return Encoder(chat, task)
    stops = stop_tokens(SimpleNamespace(generation_config=generation), chat.tokenizer)
    return Encoder(ChatTemplate(chat.tokenizer, frozenset(stops)), task)


@dataclass(frozen=True)
class EncodedExample:
    """A record as the trainer reads it.

    Args:
        unit: its sequences.
        cut: whether one of them was longer than the limit.
        target: class, in the order of the task's labels; 1 for a desirable and 0 for an undesirable answer; -1 where
            the shape has none.
    """

    unit: "Unit"
    cut: bool = False
    target: int = -1


def encode(
    encoder: ChatEncoder, records: pa.Table, max_length: int, shape: RecordShape = "completion"
) -> tuple[list["Unit"], list[str]]:
    """Encodes every record, as `build_example` does.

    Returns:
        Units in the records' order, and the ids of the records that were cut to ``max_length``.
    """
    encoded = list(build_examples(encoder, records, max_length, shape))
    cut = [id for id, example in zip(records["id"].to_pylist(), encoded, strict=True) if example.cut]
    return [example.unit for example in encoded], cut


def build_examples(
    encoder: ChatEncoder, records: pa.Table, max_length: int, shape: RecordShape
) -> list[EncodedExample]:
    """Builds an example of every record, in their order.

    Raises:
        ExampleTooLong: the first record that cannot be used is too long; those like it are counted.
        UserError: it has another fault.
    """
    columns = [name for name in (*TOKEN_COLUMNS, *SOURCE_COLUMNS) if name in records.column_names]
    rows = records.select(columns).to_pylist()
    encoded: list[EncodedExample] = []
    too_long: ExampleTooLong | None = None
    for row in rows:
        try:
            encoded.append(build_example(encoder, row, max_length, shape))
        # Too long is the one fault that comes in hundreds: counted, so that a user sees how much to cut.
        except ExampleTooLong as error:
            too_long = too_long.and_others(1) if too_long else error
        except UserError:
            if too_long is None:  # the error names the first bad record, whatever its fault
                raise
    if too_long:
        raise too_long
    return encoded


def build_example(
    encoder: ChatEncoder, record: Mapping[str, Any], max_length: int, shape: RecordShape
) -> EncodedExample:
    """Builds one record's example under a shape.

    - ``completion``, ``teacher``: prompt and answer, or a plain text, which is learned as a whole.
    - ``pair``: the chosen and the rejected answer after the prompt; only they are supervised.
    - ``labelled``: prompt and answer, which alone is supervised; ``label`` of the record's meta is true or false.
    - ``class``: the prompt and a stop token, which alone is supervised: the model is read where that token is
      predicted, at the text's last one.

    Raises:
        UserError: the record lacks what its shape needs, or no token to learn is left of it in ``max_length``.
    """
    try:
        unit, target = _SHAPES[shape](encoder, record)
    except RefusedTurns as error:
        raise record_error(record, error.what, fix=error.fix) from None
    cut = max(len(sequence.ids) for sequence in unit) > max_length
    if cut:
        # Cut from the left: the answer, which is learned, stands at the end.
        unit = [_truncate(sequence, record, max_length) for sequence in unit]
    for sequence in unit:
        if not any(sequence.supervised[1:]):  # nothing predicts a first token
            raise record_error(record, "none of its tokens is learned", fix="take it out of the data")
    return EncodedExample(unit, cut, target)


def record_error(
    record: Mapping[str, Any], what: str, *, fix: str | None = None, kind: type[UserError] = UserError
) -> UserError:
    """Returns an error that names a record by its id, and by file and line if it came from one."""
    file, line = (record.get(name) for name in SOURCE_COLUMNS)
    return kind(f"record {record['id']}: {what}", where=f"{file}:{line}" if file and line else file, fix=fix)


def _completion(encoder: ChatEncoder, record: Mapping[str, Any]) -> tuple[list[TokenizedExample], int]:
    prompt = record_turns(record)
    if not prompt or (record["prompt"] and record["completion"] is None):
        if len(prompt) > 1 and prompt[-1]["role"] == "user":
            fix = "add the answer, or take the last turn or the record out of the data"
            raise record_error(record, "its last turn is the user's, so it has no answer to learn", fix=fix)
        fix = "say which column holds it (`columns`), give it one, or take it out of the data"
        raise record_error(record, "it has no answer and no text to learn", fix=fix)
    if record["completion"] is not None:
        return [encoder.chat.encode(encoder.task.turns(prompt), record["completion"])], -1
    ids = _text_ids(encoder.chat, record["text"])
    return [TokenizedExample(ids, [True] * len(ids))], -1


def _pair(encoder: ChatEncoder, record: Mapping[str, Any]) -> tuple[list[TokenizedExample], int]:
    if not record_turns(record) or record["completion"] is None or record["rejected"] is None:
        raise record_error(
            record,
            "it is not a pair of a chosen and a rejected answer",
            fix="give it the columns `chosen` and `rejected`",
        )
    chosen, rejected = (_encode_answer(encoder, record, record[side]) for side in ("completion", "rejected"))
    # The loss of such a pair has no gradient, and its accuracy is that of a coin.
    if chosen.ids == rejected.ids:
        raise record_error(record, "its chosen and its rejected answer are the same", fix="take it out of the data")
    return [chosen, rejected], -1


def _labelled(encoder: ChatEncoder, record: Mapping[str, Any]) -> tuple[list[TokenizedExample], int]:
    meta = _meta(record)
    label = parse_thumb(meta.get("label"))
    if not record_turns(record) or record["completion"] is None or label is None:
        fix = "give it a column `label`, true where the answer is desirable and false where it is not"
        what = "it is not an answer with a label true or false"
        if meta.get("label") is not None and label is None:
            fix, what = "write true or false", f"its label `{shorten(str(meta['label']))}` is neither true nor false"
        raise record_error(record, what, fix=fix)
    return [_encode_answer(encoder, record, record["completion"])], int(label)


def _class(encoder: ChatEncoder, record: Mapping[str, Any]) -> tuple[list[TokenizedExample], int]:
    prompt = record_turns(record)
    if not prompt:
        raise record_error(record, "it has no text to classify", fix="take it out of the data")
    ids = encoder.chat.prompt_ids(encoder.task.turns(prompt))
    return [TokenizedExample([*ids, _stop_id(encoder.chat)], [False] * len(ids) + [True])], _label_index(
        encoder.task, record
    )


_SHAPES: dict[RecordShape, Callable[[ChatEncoder, Mapping[str, Any]], tuple[list[TokenizedExample], int]]] = {
    "completion": _completion,
    "teacher": _completion,
    "pair": _pair,
    "labelled": _labelled,
    "class": _class,
}


def _encode_answer(encoder: ChatEncoder, record: Mapping[str, Any], answer: str) -> TokenizedExample:
    """Encodes prompt and answer; only the answer is supervised."""
    turns = encoder.task.turns(record_turns(record))
    whole, prompt_length = encoder.chat.encode(turns, answer), len(encoder.chat.prompt_ids(turns))
    return TokenizedExample(whole.ids, [False] * prompt_length + whole.supervised[prompt_length:])


def _label_index(task: TaskConfig, record: Mapping[str, Any]) -> int:
    """Returns the class of a record: its answer's index in the task's labels, or ``label`` of its meta, a number."""
    labels, answer = task.label_set, record["completion"]
    if not labels:
        raise UserError("a classifier needs the closed set of its labels", where="task.labels", fix="name them")
    if answer is not None:
        if answer not in labels:
            raise record_error(record, f"no label `{answer}` in task.labels", fix=suggest(answer, labels))
        return labels.index(answer)
    number = _meta(record).get("label")
    if isinstance(number, str):
        if number in labels:  # such as a ClassLabel of `datasets`
            return labels.index(number)
        number = int(number) if number.strip().isdecimal() else None  # CSV has no types
    # True is an int in Python, and would be class 1.
    if not isinstance(number, int) or isinstance(number, bool):
        raise record_error(record, "it has no label", fix="give it a completion, or a column `label` with its number")
    if not 0 <= number < len(labels):
        raise record_error(
            record,
            f"label {number} is out of range, task.labels has {len(labels)}",
            fix=f"number them from 0 to {len(labels) - 1}",
        )
    return number


def parse_thumb(label: Any) -> bool | None:
    """Returns whether a ``label`` marks an answer as desirable; None if it says neither.

    CSV has no types, and programs write truth as a number, too.
    """
    return {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(
        str(label).strip().lower()
    )


def _meta(record: Mapping[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads(record.get("meta") or "{}")
    return meta


def _text_ids(chat: ChatTemplate, text: str) -> list[int]:
    """Returns the tokens of a plain text and one stop token.

    Some tokenizers write the marks of a text's beginning and end themselves, and some texts hold them.
    """
    ids, stop, begin = list(chat.tokenizer(text)["input_ids"]), _stop_id(chat), chat.tokenizer.bos_token_id
    while ids and ids[-1] == stop:
        ids.pop()
    first = 0
    while begin is not None and ids[first : first + 2] == [begin, begin]:
        first += 1
    return [*ids[first:], stop]


def _stop_id(chat: ChatTemplate) -> int:
    stop = chat.tokenizer.eos_token_id
    # The least of several, so that the choice does not depend on a set's order.
    return min(chat.stop_ids) if stop is None else int(stop)


def _truncate(sequence: TokenizedExample, record: Mapping[str, Any], max_length: int) -> TokenizedExample:
    """Keeps the last ``max_length`` tokens: the answer is at the end."""
    if len(sequence.ids) <= max_length:
        return sequence
    short = TokenizedExample(sequence.ids[-max_length:], sequence.supervised[-max_length:])
    if all(short.supervised) and record["completion"] is not None:
        raise record_error(
            record,
            f"its answer leaves no room for its prompt in {max_length} tokens",
            fix="raise train.max_length, or leave too long records out: train.too_long: drop",
            kind=ExampleTooLong,
        )
    return short
