"""Texts with counts: their nouns and verbs agree with the number, and what is filled in stays as it is."""

import json
import re
from pathlib import Path

import pytest

import posttrain.web
from posttrain.store.message import Message, counted, fit_log_number
from posttrain.web.translations import Translator

TEXTS = json.loads((Path(posttrain.web.__file__).parent / "texts" / "en.json").read_text())
COUNTED = r"\{(\w+)\} (?:\w+ )?(answers|items|records|labels|rounds|lines|turns|cores|trainings)\b"


@pytest.mark.parametrize(
    ("template", "one", "two"),
    [
        ("{n} answers were given", "1 answer was given", "2 answers were given"),
        ("{n} unchanged lines", "1 unchanged line", "2 unchanged lines"),
        ("{n} people, 3 items", "1 person, 3 items", "2 people, 3 items"),
        ("{n} batches are open", "1 batch is open", "2 batches are open"),
        ("of {n} classes", "of 1 class", "of 2 classes"),
        ("{n} is given items", "1 is given items", "2 is given items"),
    ],
)
def test_a_noun_after_a_count_of_one_is_singular(template: str, one: str, two: str) -> None:
    assert [str(Message(template, n=n)) for n in (1, "1", 2)] == [one, one, two]
    assert Message(template, n=1).template == template, "translations are found by it"


def test_values_are_not_touched() -> None:
    assert Message("{text}: {count} labels", text="1 records", count=1) == "1 records: 1 label"
    assert Message("1 records") == "1 records"


def test_a_count_has_its_noun() -> None:
    assert [counted(count, "record") for count in (0, 1, 2, 1200)] == [
        "0 records",
        "1 record",
        "2 records",
        "1,200 records",
    ]
    assert counted(2, "batch") == "2 batches"


@pytest.mark.parametrize("key", [key for key, text in TEXTS.items() if re.search(COUNTED, text)])
def test_each_text_of_the_pages_with_a_count_agrees_with_one(key: str) -> None:
    names = re.findall(r"\{(\w+)\}", TEXTS[key])
    shown = Translator("en")(key, **dict.fromkeys(names, "1"))
    assert not re.search(
        r"(?<!of )\b1 (?:\w+ )?(answers|items|records|labels|rounds|lines|turns|cores|trainings)\b", shown
    )


@pytest.mark.parametrize(
    ("template", "values", "line"),
    [
        ("  %d labels that came late in %s", (1, "a.csv"), "  1 label that came late in a.csv"),
        ("%s: %d records, %d rejected", ("pool", 1, 0), "pool: 1 record, 0 rejected"),
        ("%d of %d records", (2, 3), "2 of 3 records"),
        ("%.1f%% of %d records", (1.0, 1), "1.0% of 1 records"),
        ("{count} records", (), "{count} records"),
    ],
)
def test_lines_of_the_log_agree_too(template: str, values: tuple[object, ...], line: str) -> None:
    fitted = fit_log_number(template, values)
    assert (fitted % values if values else fitted) == line
