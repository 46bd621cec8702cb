"""Templates, tokenizers, models and examples that do not go with each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.chat import ChatTemplate
from posttrain.models.language_model import LanguageModel
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError
from posttrain.train.data.compatibility import check_model, check_template
from posttrain.train.data.tokenise import tokenise

Fresh = Callable[..., LanguageModel]
MakeRecords = Callable[..., pa.Table]


def chat(template: str | None = None, tokenizer: Any = None) -> ChatTemplate:
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return ChatTemplate(tokenizer, frozenset([tokenizer.eos_token_id]))


def check(lm: LanguageModel, records: pa.Table, max_length: int, folder: Path) -> None:
    units = tokenise(lm, records, max_length, "completion", folder)
    check_model(lm.model.config, lm.tokenizer, units, records)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + END + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("end", ["'<|end|>'", "eos_token", "''", "'\n\n'"])
def test_compatible_templates_pass(end: str) -> None:
    check_template(chat())
    check_template(chat(CHATML.replace("END", end)))


@pytest.mark.parametrize("end", ["'<|im_end|>'", "'<|im_end|>' + eos_token", "' </s>'"])
def test_an_end_of_turn_must_be_a_token(end: str) -> None:
    mark = "</s>" if "</s>" in end else "<|im_end|>"
    with pytest.raises(UserError) as caught:
        check_template(chat(CHATML.replace("END", end)))
    assert str(caught.value).startswith(
        f"model: the chat template ends turns with `{mark}`, which is not a token of the tokenizer; use the tokenizer"
    )
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [mark]})
    check_template(chat(CHATML.replace("END", end), tokenizer))


def test_a_template_mark_needs_a_token() -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<unk>", "</s>", "user", "assistant", "posttrain"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    template = (
        "{% for message in messages %}{{ MARK + message['role'] + ' ' + message['content'] + '</s>' }}{% endfor %}"
    )
    check_template(chat(template.replace("MARK", "''"), tokenizer))
    with pytest.raises(UserError, match=r"no token for `<\|turn\|>`, which the chat template writes"):
        check_template(chat(template.replace("MARK", "'<|turn|> '"), tokenizer))


def test_a_tokenizer_of_another_model_is_refused(fresh: Fresh, make_records: MakeRecords, tmp_path: Path) -> None:
    lm = fresh()
    records = make_records([("my card", "gone")])
    check(lm, records, 100, tmp_path)
    lm.tokenizer.add_tokens(["card"])
    message = "model: the tokenizer does not fit the model: `card` is token 261, and the model has 261"
    with pytest.raises(UserError, match=message):
        check(lm, records, 100, tmp_path)


def test_a_sequence_longer_than_the_models_context_is_refused(
    fresh: Fresh, make_records: MakeRecords, tmp_path: Path
) -> None:
    lm = fresh()
    records = make_records([("my card", "gone"), ("long " * 200, "gone"), (None, "text " * 250)])
    message = rf"^f:3: record {3:020x}: it has 1251 tokens, and the model reads 1024 at most; set train\.max_length to"
    with pytest.raises(UserError, match=message):
        check(lm, records, 2000, tmp_path)
    check(lm, records, 1024, tmp_path)


def test_the_template_is_checked_before_the_records(make_records: MakeRecords, tmp_path: Path) -> None:
    from posttrain.models.task import TaskConfig
    from posttrain.train.data.encoding import Encoder

    encoder = Encoder(chat(CHATML.replace("END", "'<|im_end|>'")), TaskConfig())
    with pytest.raises(UserError, match="the chat template ends turns"):
        tokenise(encoder, make_records([("hi", None)]), 100, "completion", tmp_path)
