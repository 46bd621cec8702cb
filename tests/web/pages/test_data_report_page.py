"""The page of a dataset version in a real browser: it loads nothing, fits a phone, and escapes texts of records."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.records.outcome import Rejection, reject_rows
from posttrain.data.records.record import FACT, RECORD, assign_ids, records
from posttrain.data.report.drift import Drift, measure_drift
from posttrain.data.report.page import dataset_page
from posttrain.data.report.profile import Profile, build_profile
from posttrain.web.page import render_page, write_page

pytestmark = pytest.mark.slow

SCRIPT = "<script>alert(1)</script>"
SECTIONS = [
    "funnel",
    "records",
    "labels",
    "lengths",
    "languages",
    "scores",
    "duplicates",
    "personal-data",
    "rejections",
    "words",
    "drift",
]


def _version(seed: int, weight: int) -> Profile:
    rng = random.Random(seed)
    words = ["card", "lost", "bank", "transfer", "cash", SCRIPT, "wheretheaccountis" * 12, "\u202eevil", '"><b>']
    labels = [f"a_label_with_a_long_name_{number:02}" for number in range(40)] + [SCRIPT]
    rows = [
        dict.fromkeys(RECORD.names)
        | {
            "prompt": [{"role": "user", "content": f"{number} " + " ".join(rng.choices(words, k=rng.randint(1, 30)))}],
            "completion": rng.choices(labels, [weight] + [1] * 40)[0],
            "source": f"data/<i>some</i>/of/the/many/folders/that/people/have/file-{number % 30}.jsonl",
            "line": number + 1,
            "meta": "{}",
        }
        for number in range(600)
    ]
    table = assign_ids(records(rows))
    rejections = {
        row: Rejection("near duplicate", f"like {SCRIPT}", 0.9, cluster=SCRIPT, kept=SCRIPT) for row in range(20)
    }
    rejections |= {
        row: Rejection("word count", f"{row} words, must be at least 30", float(row)) for row in range(20, 28)
    }
    remaining, rejected, *_ = reject_rows(table, "gopher_and_others", rejections)
    ids = remaining["id"].to_pylist()

    def facts(step: str, name: str, values: list[Any]) -> pa.Table:
        column = pa.array(values)
        nothing = pa.nulls(len(ids))
        columns = [nothing, column] if pa.types.is_string(column.type) else [column, nothing]
        table = pa.table(
            [pa.array(ids), pa.array([step] * len(ids)), pa.array([name] * len(ids)), *columns], FACT.names
        )
        return table.cast(FACT)

    fact_tables = [
        facts("language", "language", rng.choices(["en", "de", SCRIPT], k=len(ids))),
        facts("quality", "quality", [rng.gauss(weight, 1) for _ in ids]),
        facts("perplexity", "perplexity", [rng.lognormvariate(3, 1) for _ in ids]),
        facts("toxicity", "toxicity", [0.0] * len(ids)),
        facts("toxicity", "toxic_words", rng.choices(["none", SCRIPT], k=len(ids))),
        facts("pii", "pii_email", [float(rng.random() < 0.1) for _ in ids]),
    ]
    splits = rng.choices(["train", "test"], [9, 1], k=len(ids))
    return build_profile([remaining], [splits], [rejected], facts=fact_tables)


@pytest.fixture(scope="module")
def versions() -> tuple[Profile, Drift]:
    old, new = _version(1, 1), _version(2, 30)
    return new, measure_drift(old, new)


@pytest.fixture
def page_file(versions: tuple[Profile, Drift], tmp_path: Path) -> Path:
    page = dataset_page(*versions, heading=f"support v1.1.0 {SCRIPT}", since="v1.0.0")
    write_page(tmp_path / "page.html", lambda detail: page)
    return tmp_path / "page.html"


def test_the_dataset_page_is_sound_and_escapes_texts_of_records(
    open_in_view: Callable[[Path], Any], page_file: Path
) -> None:
    loaded = open_in_view(page_file)
    loaded.assert_self_contained()
    loaded.assert_has_sections(SECTIONS)
    loaded.assert_charts_are_named()
    loaded.assert_fits()
    assert loaded.page.locator("blockquote b, td b, i").count() == 0


def test_the_page_shows_the_measurements(
    open_page: Callable[..., Any], page_file: Path, versions: tuple[Profile, Drift]
) -> None:
    new, drift = versions
    loaded = open_page(page_file, 1100)
    page = loaded.page
    verdict = page.locator("#drift .verdict").text_content()
    assert verdict == drift.verdict + "."
    assert page.locator("#headline").inner_text().count("572") == 1
    red = page.evaluate("getComputedStyle(document.querySelector('figure')).getPropertyValue('--red').trim()")
    assert page.locator("#drift .plot svg").first.locator(f'path[stroke="{red}"]').count() == 2
    loaded.open_details()
    assert page.locator("#rejections .example").count() == 10
    assert "must be at least 30" in page.locator("#rejections").inner_text()
    assert SCRIPT in page.locator("#rejections").inner_text()
    assert page.locator(f'#drift .plot svg path[stroke="{red}"]').count() == 3, "two of PSI, and one of JS"
    assert len(new.scores) == 3


def test_an_empty_version_has_a_page(open_page: Callable[..., Any], tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", lambda detail: dataset_page(build_profile([])))
    loaded = open_page(tmp_path / "page.html")
    assert loaded.errors == []
    assert loaded.page.locator(".empty").count() == 9
    assert loaded.page.locator("#drift").count() == 0
    nothing = measure_drift(build_profile([]), build_profile([]))
    assert "nothing to compare" in render_page(dataset_page(build_profile([]), nothing))


def test_the_page_does_not_grow_with_the_number_of_sources(versions: tuple[Profile, Drift]) -> None:
    new, drift = versions
    sources = {f"source {number}": 5 for number in range(100_000)}
    labels = dataclasses.replace(new.balances["all"], counts={f"label {number}": 1 for number in range(1000)})
    large = dataclasses.replace(new, sources=sources, balances={"all": labels})
    page = render_page(dataset_page(large, drift))
    assert len(page) < 1_200_000
    assert "99,980 others" in page


def test_records_that_reading_rejects_count_once_as_input(versions: tuple[Profile, Drift]) -> None:
    counts = [("read", "in", 700), ("read", "empty", 100), ("length", "too short", 28), ("kept", "kept", 572)]
    rows = tuple({"set": "records", "step": step, "reason": reason, "count": count} for step, reason, count in counts)
    page = render_page(dataset_page(dataclasses.replace(versions[0], funnel=rows)))
    assert "of 700 that came in" in page
    assert "read: empty: 100 records, 14.3% of what came in" in page
