"""The page of a dataset version in a real browser: it loads nothing, fits a phone, and what records say stays text."""

import dataclasses
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.normalise import identify
from posttrain.data.quality_report import Drift, Profile, drift, profile
from posttrain.data.schema import FACT, RECORD, records
from posttrain.data.steps.step import Rejection, part
from posttrain.web.charts import bars, funnel, histogram, paired_bars
from posttrain.web.data_report import render_data, write_data_report

SVG = "{http://www.w3.org/2000/svg}"
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
    table = identify(records(rows))
    why = {row: Rejection("near duplicate", f"like {SCRIPT}", 0.9, cluster=SCRIPT, kept=SCRIPT) for row in range(20)}
    why |= {row: Rejection("word count", f"{row} words, must be at least 30", float(row)) for row in range(20, 28)}
    kept, rejected, *_ = part(table, "gopher_and_others", why)
    ids = kept["id"].to_pylist()

    def facts(step: str, name: str, values: list[Any]) -> pa.Table:
        told = pa.array(values)
        nothing = pa.nulls(len(ids))
        columns = [nothing, told] if pa.types.is_string(told.type) else [told, nothing]
        table = pa.table(
            [pa.array(ids), pa.array([step] * len(ids)), pa.array([name] * len(ids)), *columns], FACT.names
        )
        return table.cast(FACT)

    measured = [
        facts("language", "language", rng.choices(["en", "de", SCRIPT], k=len(ids))),
        facts("quality", "quality", [rng.gauss(weight, 1) for _ in ids]),
        facts("perplexity", "perplexity", [rng.lognormvariate(3, 1) for _ in ids]),
        facts("toxicity", "toxicity", [0.0] * len(ids)),
        facts("toxicity", "toxic_words", rng.choices(["none", SCRIPT], k=len(ids))),
        facts("pii", "pii_email", [float(rng.random() < 0.1) for _ in ids]),
    ]
    sides = rng.choices(["train", "test"], [9, 1], k=len(ids))
    return profile([kept], [sides], [rejected], facts=measured)


@pytest.fixture(scope="module")
def versions() -> tuple[Profile, Drift]:
    old, new = _version(1, 1), _version(2, 30)
    return new, drift(old, new, permutations=99)


@pytest.fixture(params=[(1280, "light"), (400, "light"), (400, "dark")], ids=["desk", "phone", "dark phone"])
def opened(
    request: pytest.FixtureRequest, open_page: Callable[..., Any], versions: tuple[Profile, Drift], tmp_path: Path
) -> Any:
    write_data_report(tmp_path / "page.html", *versions, heading=f"support v1.1.0 {SCRIPT}", since="v1.0.0")
    return open_page(tmp_path / "page.html", *request.param)


def test_the_page_loads_nothing_runs_nothing_and_fits(opened: Any) -> None:
    page = opened.page
    assert [url.rsplit("/", 1)[-1] for url in opened.requests] == ["page.html"]
    assert opened.complaints == []
    assert page.locator("script").count() == 0
    assert page.locator("blockquote b, td b, i").count() == 0
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] == wide[1]
    outside = page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter(element => {
            const box = element.getBoundingClientRect();
            return box.width > 1 && !element.closest('.scroll table')
                && (box.left < 0 || box.right > innerWidth + 0.5);
        }).map(element => element.outerHTML.slice(0, 200))"""
    )
    assert outside == []
    cut = page.evaluate(
        """() => [...document.querySelectorAll('svg text')].filter(text => {
            const box = text.getBoundingClientRect(), chart = text.closest('svg').getBoundingClientRect();
            return box.width > 0 && (box.left < chart.left - 1 || box.right > chart.right + 1
                || box.top < chart.top - 1 || box.bottom > chart.bottom + 1);
        }).map(text => text.textContent)"""
    )
    assert cut == []


def test_every_section_has_its_charts_with_names(opened: Any) -> None:
    page = opened.page
    for name in SECTIONS:
        section = page.locator(f"section#{name}")
        assert section.locator("h2").count() == 1
        assert section.locator(".empty").count() == 0, name
        assert any(shown.is_visible() for shown in section.locator("svg, details").all()), name
    for link in page.locator("nav a").all():
        assert page.locator(str(link.get_attribute("href"))).count() == 1
    for chart in page.locator("svg.chart:visible").all():
        assert chart.get_attribute("role") == "img"
        assert chart.locator("> title").text_content()


def test_the_page_says_what_was_measured(opened: Any, versions: tuple[Profile, Drift]) -> None:
    new, changed = versions
    page = opened.page
    verdict = page.locator("#drift .verdict").text_content()
    assert verdict == changed.verdict + "."
    assert page.locator("#headline").inner_text().count("572") == 1
    assert page.locator("#drift svg:visible").first.locator(".mark-line").count() == 2
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.locator("#rejections .example").count() == 10
    assert "must be at least 30" in page.locator("#rejections").inner_text()
    assert SCRIPT in page.locator("#rejections").inner_text()
    assert page.locator("#drift svg:visible .mark-line").count() == 4, "two of PSI, of JS, and MMD's"
    assert len(new.scores) == 3


def test_a_bare_version_has_a_page_too(open_page: Callable[..., Any], tmp_path: Path) -> None:
    write_data_report(tmp_path / "page.html", profile([]))
    opened = open_page(tmp_path / "page.html", 400, "light")
    assert opened.complaints == []
    assert opened.page.locator(".empty").count() == 9
    assert opened.page.locator("#drift").count() == 0
    nothing = drift(profile([]), profile([]))
    assert "nothing to compare" in render_data(profile([]), nothing)


def test_the_page_does_not_grow_with_the_set(versions: tuple[Profile, Drift]) -> None:
    new, changed = versions
    many = {f"source {number}": 5 for number in range(100_000)}
    labels = dataclasses.replace(new.balances["all"], counts={f"label {number}": 1 for number in range(1000)})
    large = dataclasses.replace(new, sources=many, balances={"all": labels})
    page = render_data(large, changed)
    assert len(page) < 400_000
    assert "99,980 others" in page


def _drawn(svg: str, tag: str, class_: str) -> list[ElementTree.Element]:
    return [shape for shape in ElementTree.fromstring(svg).iter(SVG + tag) if shape.get("class") == class_]


def test_bars_of_a_histogram_are_as_tall_as_their_counts() -> None:
    svg = histogram([0, 10, 20, 30], [4, 0, 1], "length", str, above=7, mark=(40.0, "here"))
    tall, low = (float(shape.attrib["height"]) for shape in _drawn(svg, "rect", "bar-a"))
    assert tall == pytest.approx(4 * low, rel=0.02)
    first, last = (float(shape.attrib["x"]) for shape in _drawn(svg, "rect", "bar-a"))
    (mark,) = _drawn(svg, "line", "mark-line")
    assert float(mark.attrib["x1"]) > last > first
    assert "7 above 30.0" in svg
    assert histogram([0, 1], [0], "nothing", str) == ""


def test_a_funnel_tells_what_was_added() -> None:
    svg = funnel(100, [("short", 20), ("augmented", -50), ("duplicate", 10)], "records")
    assert "+50" in svg
    assert "−20" in svg
    (kept,) = _drawn(svg, "rect", "bar-kept")
    first, added = (float(shape.attrib["width"]) for shape in _drawn(svg, "rect", "bar-a"))
    assert first == pytest.approx(2 * added, abs=0.2)
    assert float(kept.attrib["width"]) == pytest.approx(1.2 * first, abs=0.2)


def test_paired_bars_share_one_scale() -> None:
    svg = paired_bars([("a <b>", 0.2, 0.4), ("c", 0.0, 0.1)], "shares", lambda share: f"{share:.0%}")
    (before, _), (after, later) = (
        [float(shape.attrib["width"]) for shape in _drawn(svg, "rect", kind) if "rx" in shape.attrib][-2:]
        for kind in ("bar-old", "bar-a")
    )
    assert after == pytest.approx(2 * before, rel=0.01)
    assert after == pytest.approx(4 * later, rel=0.01)
    assert paired_bars([], "shares", str) == ""


def test_marks_stand_across_all_bars() -> None:
    svg = bars([("a", 0.5, "0.5")], "index", full=1.0, marks=((0.5, "half"), (0.75, "more")))
    (bar,) = _drawn(svg, "rect", "bar-a")
    half, more = (float(shape.attrib["x1"]) for shape in _drawn(svg, "line", "mark-line"))
    assert half == pytest.approx(float(bar.attrib["x"]) + float(bar.attrib["width"]), abs=0.2)
    assert more > half
