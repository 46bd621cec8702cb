"""The report in a real browser: it loads nothing, reports no error and fits a phone."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_report import CONFUSIONS, SELECTIONS, empty_page, sample_page

from posttrain.loop.selections import PoolMap, Selection
from posttrain.report.section import Page
from posttrain.store.errors import UserError
from posttrain.train.curves import training_from_steps
from posttrain.web.page import PAGE_BYTES, render_page, write_page

pytestmark = pytest.mark.slow

SECTIONS = [
    "learning-curve",
    "decisions",
    "selection",
    "training",
    "labels",
    "classes",
    "confusion",
    "data",
    "lineage",
    "time",
]


def write(path: Path, page: Page) -> None:
    write_page(path, lambda detail: page)


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write(path, sample_page())
    return path


@pytest.fixture
def loaded(open_in_view: Callable[[Path], Any], report_file: Path) -> Any:
    """The page in every view."""
    return open_in_view(report_file)


@pytest.fixture
def page(open_page: Callable[..., Any], report_file: Path) -> Any:
    """The page in one view, for what is the same in all."""
    return open_page(report_file, 1100).page


def test_the_report_page_is_sound(loaded: Any) -> None:
    loaded.assert_self_contained()
    loaded.assert_has_sections(SECTIONS)
    loaded.assert_charts_are_named()
    drawn = "figure.chart:visible .plot svg"
    assert loaded.page.locator(f"section:not(#training):not(#selection) {drawn}").count() == 8
    assert loaded.page.locator(f"#selection {drawn}").count() == 4, "gains, reasons, map, and scores of the last round"
    assert loaded.page.locator(f"#training {drawn}").count() == 11, "the last round's is open"
    sizes = loaded.page.evaluate(
        """() => [...document.querySelectorAll('figure.chart svg text')].filter(text => text.textContent.trim())
            .map(text => parseFloat(getComputedStyle(text).fontSize))"""
    )
    assert min(sizes) >= 11
    loaded.assert_fits()


def test_the_page_shows_the_headline_and_the_refused_round(page: Any) -> None:
    headline = page.locator("#headline").inner_text()
    for text in ("85.3%", "+74.0", "348", "1 refused"):
        assert text in headline
    decisions = page.locator("#decisions")
    assert "0.641 >= 0.763 * 1.02 = 0.778" in decisions.inner_text()
    assert decisions.locator(".failed:visible").count() == 1


def test_each_rounds_training_can_be_opened(page: Any) -> None:
    rounds = page.locator("#training > details")
    assert rounds.count() == 4
    assert [entry.get_attribute("open") is not None for entry in rounds.all()] == [False, False, False, True]
    assert "Round 4 120 steps, loss " in " ".join(rounds.last.locator("summary").first.inner_text().split())
    assert "1 decision" in rounds.last.locator("summary").first.inner_text()
    rounds.first.locator("summary").first.click()
    assert rounds.first.locator("figure.chart:visible").count() == 11


def test_each_rounds_selection_can_be_opened(page: Any) -> None:
    section = page.locator("#selection")
    rounds = section.locator("> details:not(.data)")
    assert rounds.count() == 4
    assert [entry.get_attribute("open") is not None for entry in rounds.all()] == [True, False, False, False]
    newest_text = " ".join(rounds.first.inner_text().split())
    assert newest_text.startswith(
        "Round 4 96 of 900 embedded, a sample of 1,025, 300 of them scored, by uncertain_diverse"
    )
    for text in (
        "Expected gain in accuracy, in points: +6.4 (+0.8 to +13.1); achieved: +9.0.",
        "More labels may no longer pay off: the last 3 champions answer the pool alike",
        "96 chosen records among 204 others of the pool and 288 that had a label",
        "error was 11.2% before and 3.4% after",
        "cancel_membership",
        "All 96 records",
    ):
        assert text in newest_text
    rounds.first.locator(".fold > summary").click()
    rows = rounds.first.locator(".fold .cards tbody tr")
    assert rows.count() == 96
    cells = [" ".join(cell.inner_text().split()) for cell in rows.first.locator("td").all()]
    assert cells[:2] == ["1", "strategy"]
    content = rows.first.locator("td").last
    assert content.locator(".because").inner_text() == "entropy 1.2, more than 90% of the pool"
    assert content.locator("code").inner_text() == f"{1:020x}"
    assert len(content.inner_text().split("\n")[0]) == 160, "long inputs are cut"
    assert rows.last.locator(".because").inner_text().endswith("; drawn with probability 0.03333")
    # Each chosen record is a point with a tooltip.
    maps = rounds.first.locator("figure.chart script").all_text_contents()
    (drawn,) = [option for option in map(json.loads, maps) if option["equal"]]
    tips = [item["tip"] for series in drawn["option"]["series"] for item in series["data"] if isinstance(item, dict)]
    assert len(tips) == 96
    assert "1, strategy, predicted refund_status: Where is my parcel?" in tips[0]
    rounds.last.locator("summary").first.click()
    assert "no model had been trained yet" in rounds.last.inner_text()
    assert rounds.last.locator("figure.chart:visible").count() == 2


def test_the_size_of_the_page_is_bounded(tmp_path: Path) -> None:
    def selection(number: int) -> Selection:
        entry = SELECTIONS[-1]
        assert entry.map is not None
        rng = np.random.default_rng(number)
        chosen = [dataclasses.replace(entry.chosen[0], id=f"{rank}", rank=rank) for rank in range(1, 501)]
        positions = {record.id: (float(rank), float(rank % 7)) for rank, record in enumerate(chosen)}
        pool_map = PoolMap(positions, 100 * rng.random((1500, 2)), 100 * rng.random((1000, 2)))
        return dataclasses.replace(entry, round=number, records=500, chosen=tuple(chosen), map=pool_map)

    page = render_page(sample_page(selections=tuple(map(selection, range(1, 31)))))
    assert len(page.encode()) < PAGE_BYTES == 2_000_000
    assert "The batches of the 10 earliest rounds are not drawn." in page
    assert "The first 50 of 500 records" in page


def test_a_report_of_long_trainings_and_long_texts_stays_under_two_megabytes(
    tmp_path: Path, training_lines: Callable[..., list[dict[str, Any]]]
) -> None:
    entry = SELECTIONS[-1]
    chosen = tuple(
        dataclasses.replace(entry.chosen[0], id=f"{rank}", rank=rank, input="请问我的包裹在哪里" * 20, why="因为" * 40)
        for rank in range(1, 301)
    )
    selections = tuple(dataclasses.replace(entry, round=number, chosen=chosen) for number in range(1, 21))
    trainings = dict.fromkeys(range(1, 21), training_from_steps("round", training_lines(3000, groups=40)))
    write_page(
        tmp_path / "page.html", lambda detail: sample_page(selections=selections, trainings=trainings, detail=detail)
    )
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(page.encode()) < PAGE_BYTES
    assert page.count('<figure class="chart">') > 200, "it is coarser, and shows all the same"


def test_an_empty_workspace_has_a_page(open_page: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "report.html", empty_page())
    page = open_page(tmp_path / "report.html").page
    assert page.locator("section .empty").count() == len(SECTIONS)
    assert page.locator("figure, svg").count() == 0


def test_the_report_escapes_texts_of_users(open_page: Callable[..., Any], tmp_path: Path) -> None:
    evil = '</script><script>hacked = "x"</script><img src=x onerror="hacked = 1"><!--`<b>`'
    record = dataclasses.replace(SELECTIONS[-1].chosen[0], input=evil, label=evil, reason=evil)
    selection = dataclasses.replace(
        SELECTIONS[-1],
        strategy=evil,
        reasons={evil: 1},
        worst_classes=(evil,),
        chosen=(record,),
        missing=(evil,),
        stop_reason=evil,
    )
    page = sample_page(
        heading=evil,
        labels={evil: 3},
        confusions=[{**CONFUSIONS[0], "expected": evil}],
        funnel=[(evil, None, 3), (evil, evil, 1)],
        selections=(selection,),
    )
    write(tmp_path / "report.html", dataclasses.replace(page, sentence=evil, subject=evil))
    loaded = open_page(tmp_path / "report.html")
    loaded.open_details()
    loaded.assert_self_contained()
    assert loaded.page.evaluate("typeof hacked") == "undefined"
    assert loaded.page.locator("img, b").count() == 0
    assert loaded.page.locator("#labels .data td").first.text_content() == evil


def test_a_smuggled_script_does_not_run(open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = render_page(sample_page()).replace("<footer", "<script>hacked = 1</script><p style='color: red'></p><footer")
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    loaded = open_page(tmp_path / "report.html")
    assert loaded.page.evaluate("typeof hacked") == "undefined"
    assert len(loaded.errors) == 2
    assert all("Content Security Policy" in error for error in loaded.errors)


def test_the_same_report_gives_the_same_page() -> None:
    assert render_page(sample_page()) == render_page(sample_page())


def test_the_report_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(UserError, match=r"report\.html: no space left on device; free some space"):
            write(path, sample_page())
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    write(path, sample_page())
    assert path.read_text().startswith("<!doctype html>")
