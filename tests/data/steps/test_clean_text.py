"""Cleaning is idempotent and keeps every character that has a meaning."""

import re
import unicodedata

import pyarrow as pa
import pyarrow.compute
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from posttrain.data.steps.normalise import Quotes, UnicodeForm, clean_text, dirty_pattern

# Joiners, spaces, line ends, marks that compose, jamo, signs that NFC changes into ASCII, and invisible characters.
ODD = " \t\n\r\v\f\0\x1b\x85\u00a0\u00ad\u0301\u0327\u1100\u1161\u200b\u200c\u200d\u2028\u202e\u212a\u3000\u037e\ufeff"
VISIBLE = "abकé☺ﬁ“"
TEXTS = st.text(st.one_of(st.sampled_from(VISIBLE + ODD), st.characters(codec="utf-8")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\rc\u2028d\u2029e\x85f\vg\fh", "a\nb\nc\nd\ne\nf\ng\nh"),
        ("a\u00a0b\u2003c\u3000d\u202fe", "a b c d e"),
        ("\ufeffa\u200bb\u2060c\u00add\0e\x1bf\x7f", "abcdef"),
        ("a\u202eb\u2066c\u200f", "abc"),
        ("hidden\U000e0041\U000e0042", "hidden"),
        ("cafe\u0301", "café"),
        ("a  \nb\t\n", "a\nb"),
        ("\n\n  a\n  b  c", "  a\n  b  c"),
        ("a\n\n\nb\n \n\t\n\n\nc", "a\n\n\nb\n\n\nc"),
        (" \u200b\n", ""),
        ("“a” ‘b’ ﬁ ²", "“a” ‘b’ ﬁ ²"),
    ],
)
def test_cleaned_texts(text: str, expected: str) -> None:
    assert clean_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    if x:\n\treturn  x\n\n\nclass A:\n    pass",
        "| a  | b |\n|----|---|",
        "می\u200cخواهم",
        "क्\u200dष",
        "👩\u200d👩\u200d👧 and ❤\ufe0f",
        "naïve Ærøskøbing Straße Привет 你好，世界。こんにちは 안녕하세요 € – “x”",
    ],
)
def test_text_with_a_meaning_stays(text: str) -> None:
    assert clean_text(text) == text


def test_joiners_without_neighbours_are_removed() -> None:
    assert clean_text("a\u200db \u200c\u200dक\u200d\u200d c") == "ab क c"


def test_compatible_forms_quotes_and_blank_lines_are_options() -> None:
    assert clean_text("ﬁ ² Ａ", form="nfkc") == "fi 2 A"
    assert clean_text("cafe\u0301", form="keep") == "cafe\u0301"
    assert clean_text("“a” ‘b’ it’s", quotes="straight") == "\"a\" 'b' it's"
    assert clean_text("a\n\n\n\nb", blank_lines=0) == "a\nb"
    assert clean_text("a\n\n\n\nb", blank_lines=1) == "a\n\nb"


@given(TEXTS, st.sampled_from(["nfc", "nfkc", "keep"]), st.sampled_from(["keep", "straight"]), st.integers(0, 3))
@example("a\u200d\u200dक", "nfc", "keep", 2)
@example("e\u200b\u0301", "nfc", "keep", 2)
@example("\u212a\u200dक", "nfc", "keep", 2)
def test_cleaning_is_idempotent(text: str, form: UnicodeForm, quotes: Quotes, blank_lines: int) -> None:
    result = clean_text(text, form, quotes, blank_lines)
    assert clean_text(result, form, quotes, blank_lines) == result
    assert "\r" not in result
    assert not re.search(r"[ \t]$", result, re.MULTILINE)
    assert "\n" * (blank_lines + 2) not in result
    assert not {unicodedata.category(item) for item in result if item not in "\n\t"} & {"Cc", "Zl", "Zp"}
    if form != "keep":
        assert unicodedata.is_normalized(form.upper(), result)


@given(
    st.lists(TEXTS, min_size=1, max_size=5),
    st.sampled_from(["nfc", "nfkc", "keep"]),
    st.sampled_from(["keep", "straight"]),
)
def test_the_dirty_pattern_matches_every_text_that_changes(texts: list[str], form: UnicodeForm, quotes: Quotes) -> None:
    result = pa.compute.match_substring_regex(pa.array(texts), dirty_pattern(form, quotes)).to_pylist()
    for text, suspicious in zip(texts, result, strict=True):
        assert suspicious or clean_text(text, form, quotes) == text


@pytest.mark.slow
def test_characters_outside_the_dirty_pattern_never_compose() -> None:
    characters = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    result = pa.compute.match_substring_regex(
        pa.array([f"a{item}b" for item in characters]), dirty_pattern()
    ).to_pylist()
    decompositions = [unicodedata.decomposition(item).split() for item in characters]
    composing = {chr(int(parts[1], 16)) for parts in decompositions if len(parts) == 2 and "<" not in parts[0]}
    jamo = {chr(code) for code in range(0x1160, 0x1200)}
    clean = {item for item, suspicious in zip(characters, result, strict=True) if not suspicious}
    assert not clean & (composing | jamo)
    assert not any(map(unicodedata.combining, clean))
    assert all(clean_text(f"a{item}b") == f"a{item}b" for item in clean)
    assert clean > set("aé你й、ひ한”")


@pytest.mark.parametrize(
    ("run", "expected"),
    [(" " * 200_000, " " * 200_000), ("\u200d" * 200_000, "\u200d" * 200_000), ("\n" * 200_000, "\n\n\n"),
     (" \n" * 100_000, "\n\n\n")],
    ids=["spaces", "joiners", "lines", "blank lines"],
)  # fmt: skip
def test_very_long_runs_are_cleaned(run: str, expected: str) -> None:
    assert clean_text(f"ä{run}ä") == f"ä{expected}ä"
