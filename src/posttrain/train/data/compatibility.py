"""Checks that chat template, tokenizer, model and examples fit together."""

import re
from typing import Any

import pyarrow as pa

from posttrain.models.chat import ChatTemplate
from posttrain.store.errors import UserError
from posttrain.train.data.record_columns import row_error
from posttrain.train.data.token_set import TokenSet

_MARK = re.compile(r"<[^<>\s]+>")
_PROBE = "posttrain"  # in no mark


def check_template(chat: ChatTemplate) -> None:
    """Checks the template on one short conversation.

    Raises:
        UserError: the tokenizer has no token for something that the template writes, or does not know the mark that
            ends the assistant's turn: its pieces would be learned as a part of every answer.
    """
    fix = "use the tokenizer that the template was made for"
    chat.answer_ids(_PROBE)  # raises if the template refuses the turns
    question = {"role": "user", "content": _PROBE}
    text = chat.conversation_text([question, {"role": "assistant", "content": _PROBE}])
    unknown = chat.tokenizer.unk_token_id
    # The probe itself may be unknown to a tiny vocabulary, which says nothing about the template.
    if unknown is not None and unknown in _ids(chat, text) and unknown not in _ids(chat, _PROBE):
        marks = [mark for mark in _MARK.findall(text) if unknown in _ids(chat, mark)]
        raise UserError(
            f"the tokenizer has no token for `{marks[0] if marks else text}`, which the chat template writes",
            where="model",
            fix=fix,
        )
    end = _MARK.match(text[text.rindex(_PROBE) + len(_PROBE) :].lstrip()) if _PROBE in text else None
    if end and len(_ids(chat, end[0])) > 1:
        raise UserError(
            f"the chat template ends turns with `{end[0]}`, which is not a token of the tokenizer",
            where="model",
            fix=fix,
        )


def check_model(config: Any, tokenizer: Any, units: TokenSet, records: pa.Table) -> None:
    """Checks the examples against the model's vocabulary and length.

    Args:
        config: the model's, as transformers has it.
        tokenizer: that made the examples.
        units: tokens of ``records``, one unit each.

    Raises:
        UserError: a token id lies outside of the model's vocabulary, or a sequence is longer than its positions.
    """
    text = config.get_text_config()
    size, most = text.vocab_size, getattr(text, "max_position_embeddings", None)
    if units.largest_id >= size:
        token = tokenizer.convert_ids_to_tokens(units.largest_id)
        raise UserError(
            f"the tokenizer does not fit the model: `{token}` is token {units.largest_id}, and the model has {size}",
            where="model",
            fix="use the model's own tokenizer",
        )
    row = int(units.longest.argmax())
    # Positions beyond the table raise an index error in the middle of training, or are extrapolated.
    if most is not None and units.longest[row] > most:
        what = f"it has {units.longest[row]} tokens, and the model reads {most} at most"
        raise row_error(records, row, what, fix=f"set train.max_length to {most}")


def _ids(chat: ChatTemplate, text: str) -> list[int]:
    return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])
