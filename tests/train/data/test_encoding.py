"""Records as token ids under each shape, and records that cannot be used."""

import json
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.records.record import RECORD
from posttrain.models.chat import ChatTemplate, TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError
from posttrain.train.data.encoding import Encoder, build_example, encode
from posttrain.train.data.tokenise import tokenise_blocks

Fresh = Callable[..., LanguageModel]
MakeRecords = Callable[..., pa.Table]


def encoder(**task: Any) -> Encoder:
    tokenizer = byte_tokenizer()
    return Encoder(ChatTemplate(tokenizer, frozenset([tokenizer.eos_token_id])), TaskConfig(**task))


def record(**values: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("prompt", "completion", "rejected", "text"))
    defaults = {"id": "r", "prompt": [{"role": "user", "content": "hi"}], "meta": json.dumps(values.pop("meta", {}))}
    return {**empty, **defaults, **values}


def decode_parts(sequence: Any) -> tuple[str, str]:
    """The text that is only read, and the text that is learned."""
    decode = byte_tokenizer().decode
    unsupervised = [token for token, on in zip(sequence.ids, sequence.supervised, strict=True) if not on]
    supervised = [token for token, on in zip(sequence.ids, sequence.supervised, strict=True) if on]
    return decode(unsupervised), decode(supervised)


def test_records_are_encoded_in_order(fresh: Fresh, make_records: MakeRecords) -> None:
    lm = fresh()
    result, cut = encode(lm, make_records([("hi", "x"), (None, "plain text"), ("card", "refund")]), 1024)
    assert cut == []
    assert [result[0], result[2]] == [
        [lm.encode([{"role": "user", "content": prompt}], answer)]
        for prompt, answer in (("hi", "x"), ("card", "refund"))
    ]
    assert lm.tokenizer.decode(result[1][0].ids) == "plain text<|end|>"
    assert all(result[1][0].supervised)


def test_a_labelled_text_becomes_a_prompt(fresh: Fresh, make_records: MakeRecords) -> None:
    """A label that people gave to a plain text is the answer to that text, as in scoring and evaluation."""
    lm = fresh()
    (row,) = make_records([(None, "my card is gone")]).to_pylist()
    labelled = pa.Table.from_pylist([{**row, "completion": "card"}], schema=RECORD)
    ((result,),), _ = encode(lm, labelled, 1024)
    assert result == lm.encode([{"role": "user", "content": "my card is gone"}], "card")


def test_an_encoder_encodes_as_its_model_does(fresh: Fresh, records: pa.Table) -> None:
    lm = fresh()
    assert encode(Encoder(lm.chat, lm.task), records, 60) == encode(lm, records, 60)


def test_long_records_are_truncated_at_the_start(fresh: Fresh, make_records: MakeRecords) -> None:
    lm = fresh()
    rows = make_records([("short", "x"), ("long " * 30, "refund"), (None, "plain " * 30)])
    uncut, no_cut = encode(lm, rows, 1024)
    result, cut = encode(lm, rows, 60)
    assert (no_cut, cut) == ([], [rows["id"][1].as_py(), rows["id"][2].as_py()])
    assert result[0] == uncut[0]
    for (short,), (long,) in zip(result[1:], uncut[1:], strict=True):
        assert (short.ids, short.supervised) == (long.ids[-60:], long.supervised[-60:])
    assert sum(result[1][0].supervised) == len("refund") + 1, "the answer is complete"


def test_an_answer_without_room_for_its_prompt_is_refused(fresh: Fresh, make_records: MakeRecords) -> None:
    rows = make_records([("hi", "x"), ("hi", "an answer of some length")])
    with pytest.raises(
        UserError, match=f"record {2:020x}: its answer leaves no room for its prompt in 25 tokens"
    ) as caught:
        encode(fresh(), rows, 25)
    assert str(caught.value).startswith(f"f:2: record {2:020x}: ")
    assert "raise train.max_length" in str(caught.value)
    assert encode(fresh(), rows, 26)[1] == [f"{2:020x}"]


def test_records_that_are_too_long_are_counted(fresh: Fresh, make_records: MakeRecords) -> None:
    long = ("hi", "an answer of some length")
    with pytest.raises(UserError) as caught:
        encode(fresh(), make_records([("hi", "x"), long, ("hi", "x"), long, ("hi", None), long]), 25)
    message = f"record {2:020x}: its answer leaves no room for its prompt in 25 tokens, and 2 more like it; raise"
    assert message in str(caught.value)
    with pytest.raises(UserError, match=f"record {1:020x}: it has no answer"):
        encode(fresh(), make_records([("hi", None), long, long]), 25)


@pytest.mark.parametrize("row", [("hi", None), (None, None), (None, "")])
def test_a_record_without_an_answer_is_refused(
    fresh: Fresh, make_records: MakeRecords, row: tuple[str | None, str | None]
) -> None:
    with pytest.raises(UserError, match=f"record {2:020x}: it has no answer"):
        encode(fresh(), make_records([("hi", "x"), row]), 1024)


def test_only_the_answers_of_a_pair_are_learned() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    result = build_example(encoder(), record(prompt=turns, completion="x", rejected="y"), 99, "pair")
    prompt = "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    assert [decode_parts(sequence) for sequence in result.unit] == [(prompt, "x<|end|>"), (prompt, "y<|end|>")]
    assert (result.target, result.cut) == (-1, False)


@pytest.mark.parametrize("text", ["plain", "plain<|end|>", "<|pad|>plain<|end|><|end|>", "one<|end|>two<|end|>"])
@pytest.mark.parametrize("template", ["$A", "$A <|end|>", "<|pad|> $A", "<|pad|> $A <|end|>"])
def test_a_text_ends_once_whatever_the_tokenizer_adds(text: str, template: str) -> None:
    from tokenizers.processors import TemplateProcessing

    source = encoder()
    tokenizer = source.chat.tokenizer
    tokenizer.bos_token = "<|pad|>"  # any token that is not the last one
    marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in ("<|pad|>", "<|end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=marks)
    (sequence,) = build_example(source, record(prompt=None, text=text), 99, "completion").unit
    body = re.sub(r"(<\|end\|>)+$", "", text.removeprefix("<|pad|>"))
    begins = "<|pad|>" in text + template
    assert tokenizer.decode(sequence.ids) == ("<|pad|>" if begins else "") + body + "<|end|>"
    assert all(sequence.supervised)


@pytest.mark.parametrize(
    ("label", "target"),
    [(True, 1), (False, 0), (1, 1), (0, 0), (1.0, 1), ("true", 1), ("False", 0), (" TRUE ", 1), ("1", 1), ("0", 0)],
)
def test_the_label_of_an_answer_is_the_target(label: Any, target: int) -> None:
    result = build_example(encoder(), record(completion="x", meta={"label": label}), 99, "labelled")
    assert (decode_parts(*result.unit), result.target) == (("<|user|>hi<|end|><|assistant|>", "x<|end|>"), target)


@pytest.mark.parametrize(
    "values", [{"completion": "b"}, {"meta": {"label": 1}}, {"meta": {"label": "1"}}, {"meta": {"label": "b"}}]
)
def test_a_class_is_predicted_at_the_end_of_the_prompt(values: dict[str, Any]) -> None:
    result = build_example(encoder(labels=["a", "b"]), record(**values), 99, "class")
    assert (decode_parts(*result.unit), result.target) == (("<|user|>hi<|end|><|assistant|>", "<|end|>"), 1)
    short = build_example(encoder(labels=["a", "b"]), record(**values), 4, "class")
    assert (short.unit, short.cut) == ([TokenizedExample(result.unit[0].ids[-4:], [False] * 3 + [True])], True)


@pytest.mark.parametrize(
    ("values", "shape", "message"),
    [
        ({"completion": "x"}, "pair", "it is not a pair of a chosen and a rejected answer"),
        ({"completion": "x", "rejected": "x"}, "pair", "its chosen and its rejected answer are the same"),
        ({"completion": "x"}, "labelled", "not an answer with a label true or false; give it a column `label`"),
        ({"completion": "x", "meta": {"label": "good"}}, "labelled", "its label `good` is neither true nor false"),
        ({"completion": "x", "meta": {"label": 2}}, "labelled", "its label `2` is neither true nor false"),
        ({"meta": {"label": True}}, "labelled", "not an answer with a label true or false"),
        ({"completion": "lone"}, "class", "no label `lone` in task.labels; did you mean `loan`?"),
        ({"meta": {"label": 2}}, "class", "label 2 is out of range, task.labels has 2"),
        ({"meta": {"label": -1}}, "class", "label -1 is out of range, task.labels has 2"),
        ({"meta": {"label": "loans"}}, "class", "it has no label"),
        ({}, "class", "it has no label"),
        ({"prompt": None, "completion": "loan"}, "class", "it has no text to classify"),
        ({"prompt": None, "text": "\u0000"}, "completion", "none of its tokens is learned"),
    ],
)
def test_unusable_records_are_refused(values: dict[str, Any], shape: Any, message: str) -> None:
    record_encoder = encoder(labels=["loan", "card"])
    if "text" in values:  # some tokenizers drop such characters
        from tokenizers import normalizers

        record_encoder.chat.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u0000", "")
    with pytest.raises(UserError) as caught:
        build_example(record_encoder, record(**values), 99, shape)
    assert message in str(caught.value)
    assert str(caught.value).startswith("record r: ")


def test_a_classifier_needs_labels() -> None:
    with pytest.raises(UserError, match=r"task\.labels: a classifier needs the closed set of its labels"):
        build_example(encoder(), record(completion="x"), 99, "class")


TURN = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}" + TURN
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TURN
NO_TOOL = TURN.replace("messages %}", "messages if m.role != 'tool' %}")


@pytest.mark.parametrize(
    ("template", "roles", "message"),
    [
        (ALTERNATING, ("user", "user"), "refuses the turns (user, user) that end in `text 1`: Conversation roles must"),
        (NO_SYSTEM, ("system", "user"), "refuses the turns (system, user) that end in `text 1`: System role not"),
        (NO_TOOL, ("user", "tool"), "drops the turns of tools"),
        (
            TURN.replace("messages %}", "messages[-1:] %}"),
            ("user", "assistant", "user"),
            "drops all turns but the last",
        ),
        (TURN.replace("messages %}", "messages if m.role != 'system' %}"), ("system", "user"), "drops system messages"),
    ],
)
def test_turns_that_the_template_refuses_or_drops_name_the_record(
    template: str, roles: tuple[str, ...], message: str
) -> None:
    source = encoder()
    source.chat.tokenizer.chat_template = template + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    turns = [{"role": role, "content": f"text {number}"} for number, role in enumerate(roles)]
    good = record(completion="x", source="a.jsonl", line=1)
    rows = [good] * 600 + [record(prompt=turns, completion="x", source="a.jsonl", line=7)]
    table = pa.Table.from_pylist([{**dict.fromkeys(RECORD.names), **row} for row in rows], schema=RECORD)
    with pytest.raises(UserError) as caught:
        list(tokenise_blocks(source, table, 99, "completion", 2 if template is NO_TOOL else 1))
    assert str(caught.value).startswith("a.jsonl:7: record r: the model's chat template ")
    assert message in str(caught.value)
