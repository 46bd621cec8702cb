from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from posttrain.models.chat import ChatTemplate, RefusedTurns
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import TaskConfig, Turns
from posttrain.store.errors import UserError

MakeTokenizer = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """A template as a family ships it, and how an answer looks in it."""

    template: str | None
    eos: str
    special: tuple[str, ...]
    stop: str  # how an answer ends
    before: str = ""  # text between the generation prompt and the answer
    sentencepiece: bool = False
    system: bool = True
    keeps_earlier_answers: bool = True


CHATML = Family(
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "<|im_end|>",
    ("<|im_start|>",),
    "<|im_end|>",
)
LLAMA3 = Family(
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "<|eot_id|>",
    ("<|start_header_id|>", "<|end_header_id|>"),
    "<|eot_id|>",
)
MISTRAL = Family(
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    "</s>",
    (),
    "</s>",
    system=False,
    sentencepiece=True,
)
MISTRAL_V3 = Family(
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% if loop.last and messages[0]['role'] == 'system' %}"
    "{{ '[INST] ' + messages[0]['content'] + '\n\n' + message['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}",
    "</s>",
    ("[INST]", "[/INST]"),
    "</s>",
    before=" ",
)
GEMMA = Family(
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "<eos>",
    ("<start_of_turn>", "<end_of_turn>"),
    "<end_of_turn>",
    system=False,
)
PHI3 = Family(
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "<|endoftext|>",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "<|end|>",
    sentencepiece=True,
)
QWEN3 = Family(
    "{% for message in messages %}{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message['content'] + '<|im_end|>\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'].split('</think>')[-1] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "<|im_end|>",
    ("<|im_start|>", "<think>", "</think>"),
    "<|im_end|>",
    before="<think>\n\n</think>\n\n",
    keeps_earlier_answers=False,
)
REASONER = Family(  # the prompt opens the reasoning, and a finished answer does not show it
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}"
    "{% else %}{{ '<|User|>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}",
    "<|end_of_sentence|>",
    ("<|User|>", "<|Assistant|>", "<think>", "</think>"),
    "<|end_of_sentence|>",
    before="\n</think>\n\n",
    keeps_earlier_answers=False,
)
UNSTOPPED = Family(  # no turn ends with a token that stops
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    "<|endoftext|>",
    (),
    "\n<|endoftext|>",
    before=" ",
    keeps_earlier_answers=False,
)
BASE = Family(None, "<|endoftext|>", (), "<|endoftext|>")

FAMILIES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral-v3": MISTRAL_V3,
    "gemma": GEMMA,
    "phi3": PHI3,
    "qwen3": QWEN3,
    "reasoner": REASONER,
    "unstopped": UNSTOPPED,
    "base": BASE,
}

PROMPT: Turns = [{"role": "user", "content": "What is two and two?"}]
CONVERSATION: Turns = [
    *PROMPT,
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And three and three?"},
]
ANSWER = "It is six."


class _Generation:
    def __init__(self, eos: int | list[int]) -> None:
        self.generation_config = type("Config", (), {"eos_token_id": eos})()
        self.base_model = self  # `LanguageModel` looks up the decoder when it is constructed


@pytest.fixture(params=FAMILIES)
def family_and_lm(request: pytest.FixtureRequest, make_tokenizer: MakeTokenizer) -> tuple[Family, LanguageModel]:
    family = FAMILIES[request.param]
    tokenizer = make_tokenizer(family.template, family.eos, *family.special, sentencepiece=family.sentencepiece)
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(family.stop.strip())]
    return family, LanguageModel(_Generation(stops), tokenizer, TaskConfig())


def decode_ids(lm: LanguageModel, ids: list[int]) -> str:
    return str(lm.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def supervised_texts(lm: LanguageModel, turns: Turns, answer: str) -> list[str]:
    """The supervised runs of an example, as text."""
    example = lm.encode(turns, answer)
    assert len(example.ids) == len(example.supervised)
    runs: list[list[int]] = []
    previous = False
    for token, on in zip(example.ids, example.supervised, strict=True):
        if on and not previous:
            runs.append([])
        if on:
            runs[-1].append(token)
        previous = on
    return [decode_ids(lm, run) for run in runs]


def test_the_answer_and_its_stop_token_are_supervised(family_and_lm: tuple[Family, LanguageModel]) -> None:
    family, lm = family_and_lm
    # A decoder that drops the space put before a piece drops it before a lone answer too.
    assert [run.strip(" ") for run in supervised_texts(lm, PROMPT, ANSWER)] == [
        (family.before + ANSWER + family.stop).strip(" ")
    ]


def test_earlier_answers_are_supervised_if_the_template_keeps_them(
    family_and_lm: tuple[Family, LanguageModel],
) -> None:
    family, lm = family_and_lm
    expected = [family.before + ANSWER + family.stop]
    if family.keeps_earlier_answers:
        expected.insert(0, family.before + "It is four." + family.stop)
    assert [run.strip(" ") for run in supervised_texts(lm, CONVERSATION, ANSWER)] == [
        run.strip(" ") for run in expected
    ]


@pytest.mark.parametrize("turns", [PROMPT, CONVERSATION])
@pytest.mark.parametrize("answer", [ANSWER, "Paris", "a\n\nb", "", "\n", " x"])
def test_training_ids_are_the_ids_served(
    family_and_lm: tuple[Family, LanguageModel], turns: Turns, answer: str
) -> None:
    _, lm = family_and_lm
    example = lm.encode(turns, answer)
    prompt_ids, answer_ids = lm.prompt_ids(turns), lm.answer_ids(answer)
    assert example.ids == prompt_ids + answer_ids
    assert example.supervised[len(prompt_ids) :] == [True] * len(answer_ids)
    rendered = lm.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt_ids == lm.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert answer_ids[-1] in lm.chat.stop_ids
    assert not lm.chat.stop_ids & set(answer_ids[:-1])


ALWAYS_OPEN = replace(  # as Qwen3's Thinking models: a finished answer shows its thought
    REASONER,
    template=REASONER.template.replace(
        "'<|Assistant|>' + message['content'].split('</think>')[-1]",
        "'<|Assistant|><think>\n' + message['content'].removeprefix('<think>\n')",
    ),
)


@pytest.mark.parametrize("family", [REASONER, ALWAYS_OPEN], ids=["dropped", "shown"])
@pytest.mark.parametrize(
    ("answer", "learned"),
    [
        ("42", "\n</think>\n\n42"),
        ("<think>\n6 * 7\n</think>\n\n42", "6 * 7\n</think>\n\n42"),
        ("<think>6 * 7</think>42", "6 * 7</think>42"),
        ("6 * 7</think>42", "6 * 7</think>42"),
        ("<think>\n\n</think>\n\n42", "\n</think>\n\n42"),
    ],
)
def test_a_thought_that_the_prompt_opens_is_closed_once(
    family: Family, answer: str, learned: str, make_tokenizer: MakeTokenizer
) -> None:
    tokenizer = make_tokenizer(family.template, family.eos, *family.special)
    chat = ChatTemplate(tokenizer, frozenset([tokenizer.eos_token_id]))
    ids = chat.answer_ids(answer)
    assert tokenizer.decode(ids) == learned + family.stop
    text = tokenizer.decode(chat.encode(PROMPT, answer).ids)
    assert (text.count("<think>"), text.count("</think>")) == (1, 1)
    # What a model generates is read as the answer that records hold, and learned as the same tokens again.
    assert chat.answer_ids(chat.answer_text(learned)) == ids
    assert chat.answer_text(chat.answer_text("\n</think>\n\n42")) == "42"


def test_a_thought_that_never_ends_is_refused(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(REASONER.template, REASONER.eos, *REASONER.special)
    chat = ChatTemplate(tokenizer, frozenset([tokenizer.eos_token_id]))
    with pytest.raises(RefusedTurns, match=r"the answer opens a thought \(`<think>`\) that never ends"):
        chat.answer_ids("<think>\n6 * 7")


@pytest.mark.parametrize(
    "family_and_lm", [name for name in FAMILIES if FAMILIES[name].keeps_earlier_answers], indirect=True
)
def test_an_example_equals_the_rendered_conversation(family_and_lm: tuple[Family, LanguageModel]) -> None:
    """The tokens of the whole conversation, tokenised at once, are those of the example up to the last stop token."""
    _, lm = family_and_lm
    for turns in (PROMPT, CONVERSATION):
        conversation = [*turns, {"role": "assistant", "content": ANSWER}]
        text = lm.tokenizer.apply_chat_template(conversation, tokenize=False)
        whole = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        ends = [position for position, token in enumerate(whole) if token in lm.chat.stop_ids]
        assert lm.encode(turns, ANSWER).ids == whole[: ends[-1] + 1]


def test_rendering_is_prefix_preserving(family_and_lm: tuple[Family, LanguageModel]) -> None:
    family, lm = family_and_lm
    first, second = lm.prompt_ids(PROMPT), lm.prompt_ids(CONVERSATION)
    answered = lm.encode(PROMPT, "It is four.").ids
    assert answered[: len(first)] == first
    assert (second[: len(answered)] == answered) == family.keeps_earlier_answers


def test_the_mask_agrees_with_generation_marks(make_tokenizer: MakeTokenizer) -> None:
    """transformers' own mask, for a template that has the marks."""
    marked = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(marked, "<|im_end|>", "<|im_start|>")
    chat = ChatTemplate(tokenizer, frozenset([tokenizer.eos_token_id]))
    turns = [{"role": "system", "content": "Be brief."}, *CONVERSATION]
    reference = tokenizer.apply_chat_template(
        [*turns, {"role": "assistant", "content": ANSWER}], return_dict=True, return_assistant_tokens_mask=True
    )
    example = chat.encode(turns, ANSWER)
    length = len(example.ids)
    assert example.ids == reference["input_ids"][:length]
    assert [int(on) for on in example.supervised] == reference["assistant_masks"][:length]
    assert sum(reference["assistant_masks"][length:]) == 0


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.system])
def test_an_unsupported_system_message_is_a_one_line_error(name: str, make_tokenizer: MakeTokenizer) -> None:
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family.template, family.eos, *family.special)
    lm = LanguageModel(_Generation(tokenizer.eos_token_id), tokenizer, TaskConfig(system="Be brief."))
    with pytest.raises(UserError, match=r"chat template refuses the turns \(system, user\)") as caught:
        lm.encode(PROMPT, ANSWER)
    assert "\n" not in str(caught.value)


def test_a_conversation_may_open_with_the_assistant(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(CHATML.template, CHATML.eos, *CHATML.special)
    lm = LanguageModel(_Generation(tokenizer.eos_token_id), tokenizer, TaskConfig())
    turns = [{"role": "assistant", "content": "The capital of Italy is Rome."}, *PROMPT]
    assert supervised_texts(lm, turns, ANSWER) == ["It is six.<|im_end|>"]


def test_the_task_wraps_the_last_user_turn(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(CHATML.template, CHATML.eos, *CHATML.special)
    task = TaskConfig(system="Be brief.", template="Question: {prompt}?!")
    lm = LanguageModel(_Generation(tokenizer.eos_token_id), tokenizer, task)
    assert decode_ids(lm, lm.prompt_ids(CONVERSATION)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is two and two?<|im_end|>\n"
        "<|im_start|>assistant\nIt is four.<|im_end|>\n<|im_start|>user\nQuestion: And three and three??!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Shout."}, *PROMPT]
    assert "Be brief." not in decode_ids(lm, lm.prompt_ids(own))
    assert own[1] == {"role": "user", "content": "What is two and two?"}, "the caller's turns stay as they are"


def test_stop_tokens_come_from_both_configs(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(GEMMA.template, GEMMA.eos, *GEMMA.special)
    turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    both = LanguageModel(_Generation([turn]), tokenizer, TaskConfig())
    assert both.chat.stop_ids == {turn, tokenizer.eos_token_id}
    # Without the generation config the answer still ends: with the tokenizer's own stop token.
    lm = LanguageModel(_Generation(tokenizer.eos_token_id), tokenizer, TaskConfig())
    assert decode_ids(lm, lm.answer_ids("six")) == "six<end_of_turn>\n<eos>"


def test_a_model_without_a_stop_token_is_refused(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(None, "</s>")
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="names a stop token"):
        LanguageModel(_Generation([]), tokenizer, TaskConfig())
    lm = LanguageModel(_Generation([3, 7]), tokenizer, TaskConfig())
    lm.tokenizer.chat_template = CHATML.template
    assert lm.answer_ids("six")[-1] == 3
