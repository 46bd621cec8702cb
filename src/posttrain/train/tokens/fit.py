"""Whether template, tokenizer, model and examples go with each other."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from posttrain.models.chat import Chat
from posttrain.store.errors import UserError
from posttrain.train.tokens.token_set import TokenSet, longest

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel
    from posttrain.models.packing import Unit

_MARK = re.compile(r"<[^<>\s]+>")
_WORD = "posttrain"  # in no mark


def check_template(chat: Chat) -> None:
    """Look at one short conversation under the template.

    Raises:
        UserError: the tokenizer has no token for something that the template writes, or does not know the mark that
            ends the assistant's turn: its pieces would be learned as a part of every answer.
    """
    fix = "use the tokenizer that the template was made for"
    chat.answer_ids(_WORD)  # says so if the template refuses the turns
    asked = {"role": "user", "content": _WORD}
    text = str(chat.tokenizer.apply_chat_template([asked, {"role": "assistant", "content": _WORD}], tokenize=False))
    unknown = chat.tokenizer.unk_token_id
    if unknown is not None and unknown in _ids(chat, text) and unknown not in _ids(chat, _WORD):
        marks = [mark for mark in _MARK.findall(text) if unknown in _ids(chat, mark)]
        raise UserError(
            f"the tokenizer has no token for `{marks[0] if marks else text}`, which the chat template writes",
            where="model",
            fix=fix,
        )
    end = _MARK.match(text[text.rindex(_WORD) + len(_WORD) :].lstrip()) if _WORD in text else None
    if end and len(_ids(chat, end[0])) > 1:
        raise UserError(
            f"the chat template ends turns with `{end[0]}`, which is no token of the tokenizer", where="model", fix=fix
        )


def check_model(lm: "LanguageModel", units: "Sequence[Unit]") -> None:
    """Hold the examples against what the model can read.

    Raises:
        UserError: a token id is none of the model's, or a sequence is longer than the model has positions.
    """
    config: Any = lm.model.config.get_text_config()
    known, most = lm.model.get_input_embeddings().num_embeddings, getattr(config, "max_position_embeddings", None)
    largest, tokens = _extremes(units)
    if largest >= known:
        token = lm.tokenizer.convert_ids_to_tokens(largest)
        raise UserError(
            f"the tokenizer does not fit the model: `{token}` is token {largest}, and the model has {known}",
            where="model",
            fix="use the model's own tokenizer",
        )
    if most is not None and tokens > most:
        raise UserError(
            f"{_record(units, int(longest(units).argmax()))} has {tokens} tokens, and the model reads {most} at most",
            where="train.max_length",
            fix=f"set it to {most}",
        )


def _extremes(units: "Sequence[Unit]") -> tuple[int, int]:
    """The largest token id, and the tokens of the longest sequence."""
    if isinstance(units, TokenSet):
        return units.largest_id, int(units.longest.max())
    return max(max(sequence.ids) for unit in units for sequence in unit), int(longest(units).max())


def _record(units: "Sequence[Unit]", row: int) -> str:
    return f"record {units.record_ids[row]}" if isinstance(units, TokenSet) else f"example {row + 1}"


def _ids(chat: Chat, text: str) -> list[int]:
    return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])
