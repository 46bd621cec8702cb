"""Identities are hashes of a fixed form of the content, however fast they are made."""

import hashlib
import json
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.normalise import Turn, identities, input_id, normal_text, record_id

CHARACTERS = st.characters(max_codepoint=0x17F, exclude_categories=["Cs"]) | st.sampled_from(
    ' \t\n\x0b\x0c\r\x1c\x1f\x7f\x85\xa0\u2028\u3000\u0301\ufb01\u1e9b"\\e'
)
TEXTS = st.text(CHARACTERS, max_size=12)
PROMPTS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": TEXTS}), max_size=2)


def plain(text: str | None) -> str | None:
    return None if text is None else " ".join(unicodedata.normalize("NFC", text).split())


def digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


@settings(max_examples=300, deadline=None)
@given(st.none() | PROMPTS, st.none() | TEXTS, st.none() | TEXTS, st.none() | TEXTS)
def test_they_hash_the_json_of_the_normal_form(
    prompt: list[Turn] | None, completion: str | None, rejected: str | None, text: str | None
) -> None:
    turns = None if prompt is None else [[turn["role"], plain(turn["content"])] for turn in prompt]
    expected = (
        digest([turns, plain(completion), plain(rejected), plain(text)]),
        digest([turns, plain(text)]),
    )
    assert identities(prompt, completion, rejected, text) == expected
    assert (record_id(prompt, completion, rejected, text), input_id(prompt, text)) == expected


def test_every_character_alone_and_between_others() -> None:
    for code in [*range(0x3000 + 2), 0xFEFF, 0x1F600]:
        for text in (chr(code), f" a{chr(code)}  b"):
            if not 0xD800 <= code < 0xE000:
                assert normal_text(text) == plain(text)
