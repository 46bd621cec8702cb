"""The user's own tokens within a prompt."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.select.adversarial.rewriting import Vocabulary, find_passage


def decode(lm: LanguageModel, ids: list[int]) -> str:
    return str(lm.tokenizer.decode(ids))


@pytest.mark.parametrize("text", ["my card", "x", "y marks x", "Message: (end)", "<|user|> says", "ünï ✓", "  two  "])
def test_the_passage_is_the_users_text_without_the_template(labeller: LanguageModel, text: str) -> None:
    passage = find_passage(labeller, [{"role": "user", "content": text}])
    assert passage is not None
    assert [*passage.before, *passage.own, *passage.after] == labeller.prompt_ids(passage.prompt(passage.text))
    assert passage.lead + passage.text + passage.tail == decode(labeller, passage.own)
    assert passage.text == text.strip()
    assert passage.lead.strip() == passage.tail.strip() == ""
    assert decode(labeller, passage.before).rstrip().endswith("Message:")
    assert decode(labeller, passage.after).lstrip().startswith("(end)")


def test_the_passage_is_the_users_last_turn(labeller: LanguageModel) -> None:
    turns = [
        {"role": "user", "content": "my card"},
        {"role": "assistant", "content": "card"},
        {"role": "user", "content": "my card"},
    ]
    passage = find_passage(labeller, turns)
    assert passage is not None
    assert passage.position == 2
    assert passage.prompt("my cash") == [*turns[:2], {"role": "user", "content": "my cash"}]
    assert find_passage(labeller, [{"role": "system", "content": "nothing asked"}]) is None


def test_tokens_that_do_not_survive_encoding_are_no_rewriting(labeller: LanguageModel) -> None:
    passage = find_passage(labeller, [{"role": "user", "content": "my card"}])
    assert passage is not None
    role_token, space = labeller.tokenizer.convert_tokens_to_ids(["<|user|>", "Ġ"])
    letters = list(passage.own)
    assert passage.rewritten(labeller, letters) == "my card"
    assert passage.rewritten(labeller, [space, *letters[1:]]) is None  # stored without the space
    half_character = next(token for token in range(256) if "\ufffd" in labeller.tokenizer.decode([token]))
    assert passage.rewritten(labeller, [half_character, *letters[1:]]) is None
    vocabulary = Vocabulary.from_language_model(labeller)
    assert not vocabulary.allowed[[role_token, space, half_character]].any()


def test_tokens_that_a_real_tokenizer_would_merge_are_refused(smollm2: Path) -> None:
    lm = load_language_model(smollm2, TaskConfig(system="Name the intent."))
    passage = find_passage(lm, [{"role": "user", "content": "my card is late"}])
    assert passage is not None
    assert decode(lm, passage.own) == "my card is late"
    first, second = (lm.tokenizer(text)["input_ids"] for text in (" l", "ate"))
    split = [*passage.own[:-1], *first, *second]
    assert decode(lm, split) == "my card is late"
    assert passage.rewritten(lm, split) is None


@given(data=st.data())
def test_a_rewriting_encodes_to_exactly_its_tokens(labeller: LanguageModel, data: st.DataObject) -> None:
    passage = find_passage(labeller, [{"role": "user", "content": "my card"}])
    assert passage is not None
    own = data.draw(st.lists(st.integers(0, 255), min_size=len(passage.own), max_size=len(passage.own)))
    text = passage.rewritten(labeller, own)
    if text is not None:
        assert labeller.prompt_ids(passage.prompt(text)) == [*passage.before, *own, *passage.after]


def test_swaps_keep_word_boundaries_and_exclude_special_tokens(labeller: LanguageModel) -> None:
    import torch

    vocabulary = Vocabulary.from_language_model(labeller)
    own = torch.tensor(labeller.tokenizer("a ,\n")["input_ids"])
    allowed = vocabulary.fits(own)
    texts = [labeller.tokenizer.decode([token]) for token in range(len(labeller.tokenizer))]
    assert [position for position in range(4) if allowed[position].any()] == [0, 2]  # a space and a line break stay
    swaps = {texts[token] for token in allowed[0].nonzero()[:, 0].tolist()}
    assert swaps == {chr(code) for code in range(33, 127) if chr(code).isalnum()} - {"a"}
    assert not any(texts[token].isalnum() for token in allowed[2].nonzero()[:, 0].tolist())
