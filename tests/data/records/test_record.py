"""Record ids are hashes of the normal form of the content."""

import hashlib
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.reading.reader import read
from posttrain.data.records.record import (
    Turn,
    assign_ids,
    content_ids,
    fold_case,
    image_name,
    input_id,
    record_id,
)

CHARACTERS = st.characters(max_codepoint=0x17F, exclude_categories=["Cs"]) | st.sampled_from(
    ' \t\n\x0b\x0c\r\x1c\x1f\x7f\x85\xa0\u2028\u3000\u0301\ufb01\u1e9b"\\e'
)
TEXTS = st.text(CHARACTERS, max_size=12)
PROMPTS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": TEXTS}), max_size=2)


def plain(text: str | None) -> str | None:
    return None if text is None else " ".join(unicodedata.normalize("NFC", text).split())


def digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.none() | PROMPTS, st.none() | TEXTS, st.none() | TEXTS, st.none() | TEXTS, st.none() | TEXTS)
def test_ids_hash_the_json_of_the_normal_form(
    prompt: list[Turn] | None, completion: str | None, rejected: str | None, text: str | None, image: str | None
) -> None:
    images = [] if image is None else [image]
    turns = None if prompt is None else [[turn["role"], plain(turn["content"])] for turn in prompt]
    expected = (
        digest([turns, plain(completion), plain(rejected), plain(text), *images]),
        digest([turns, plain(text), *images]),
    )
    assert content_ids(prompt, completion, rejected, text, image) == expected
    assert (record_id(prompt, completion, rejected, text, image), input_id(prompt, text, image)) == expected


def test_every_character_is_normalised_alone_and_between_others() -> None:
    for code in [*range(0x3000 + 2), 0xFEFF, 0x1F600]:
        for text in (chr(code), f" a{chr(code)}  b"):
            if not 0xD800 <= code < 0xE000:
                assert fold_case(text) == str(plain(text)).casefold()


def test_one_text_about_two_images_is_two_records(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": "What is this?", "completion": "a cat", **fields} for fields in ({}, {"image": "1.png"})]
    rows += [{**rows[0], "image": "2.png"}, {**rows[0], "meta": {"image": "2.png"}}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (table,) = read(file)
    for column in ("id", "input_id"):
        no_image, first_image, second_image, image_in_meta = table[column].to_pylist()
        assert len({no_image, first_image, second_image}) == 3
        assert image_in_meta == second_image
    assert assign_ids(table).equals(table)
    assert table["id"][0].as_py() == record_id([{"role": "user", "content": "What is this?"}], "a cat", None, None)


@pytest.mark.parametrize("meta", [None, "{}", '{"image": ""}', '{"image": {"path": "a.png"}}', '{"a": "\\"image\\""}'])
def test_only_a_file_name_is_an_image(meta: str | None) -> None:
    assert image_name(meta) is None
