"""Configs are read strictly: numbers as they look, bounded size and depth, and errors of one line."""

from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import UserError
from posttrain.store.yaml_files import line_of, parse_yaml, read_yaml

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{number}: &a{number} [{','.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 10)
)
MERGED_BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{number}: &a{number} {{<<: [{','.join([f'*a{number - 1}'] * 10)}]}}\n" for number in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"),
        ("-1:30:15.5", "-1:30:15.5"),
        ("010", "010"),
        ("08", "08"),
        ("0", 0),
        ("-17", -17),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0b11", 3),
        ("1.5", 1.5),
        ("-.5", -0.5),
        ("4.0e-3", 0.004),
        (".inf", float("inf")),
        ("yes", True),
        ("'yes'", "yes"),
        ("~", None),
    ],
)
def test_plain_values(text: str, value: Any) -> None:
    result = parse_yaml(text, "f")
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 51 + "]" * 51, "nested more than 50 deep"),
        ("[" * 100_000, "nested more than 50 deep"),
        ("- " * 5000, "nested more than 50 deep"),
        (BOMB, "more than 200,000 values"),
        (MERGED_BOMB, "more than 200,000 values"),
        ("a: &a [*a]", "`*a` refers to itself"),
        ("a: *b", "found undefined alias"),
        ('a: "\\0"', "a character that is not text"),
        ('"\\ud800": 1', "a character that is not text"),
        ("a: " + "9" * 5000, "broken YAML: "),
        ("a: 2026-02-30", "broken YAML: "),
        ("a: 1\na: 2", "`a` is given twice"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("\x00", "special characters are not allowed"),
        ("--- 1\n--- 2", "but found another document"),
    ],
)
def test_what_cannot_be_read_gives_one_short_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_yaml(text, "f")
    assert str(error.value).startswith("f: broken YAML: ")
    assert message in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300


def test_aliases_are_read(tmp_path: Path) -> None:
    assert parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n", "f")["c"] == {"x": 1, "y": 2}


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: " + "x" * 1_000_000)
    with pytest.raises(UserError, match=r"a\.yaml: is larger than 1,000,000 bytes"):
        read_yaml(tmp_path / "a.yaml")


def test_the_line_of_a_key_and_of_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\nb:\n  c: 2\nd: [1, 2]\ne: {\n")
    with pytest.raises(UserError, match=r"a\.yaml:6: broken YAML"):
        read_yaml(file)
    assert line_of(file, "b.c") is None, "of a broken file"
    file.write_text("a: 1\nb:\n  c: 2\nd: [1, 2]\n")
    assert [line_of(file, key) for key in ("a", "b.c", "d.1")] == [1, 3, 4]
    assert [line_of(file, key) for key in ("d.9", "x", "d." + "9" * 99)] == [None] * 3
