"""A page in a real browser, and what holds for every page."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page


@dataclasses.dataclass
class Opened:
    """A page in the browser, what it asked for, and what it complained of."""

    page: Page
    requests: list[str]
    complaints: list[str]

    def unfold(self) -> None:
        """Open all that is folded."""
        self.page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")

    def assert_keeps_to_itself(self) -> None:
        """It loads nothing, runs nothing and complains about nothing."""
        assert self.requests == [self.page.url]
        assert self.complaints == []
        assert self.page.locator("script").count() == 0

    def assert_has_sections(self, names: Sequence[str]) -> None:
        """All of them are there, each with something to see, and the links lead to them."""
        for name in names:
            section = self.page.locator(f"section#{name}")
            assert section.locator("h2").count() == 1
            assert section.locator(".caption").is_visible()
            assert any(shown.is_visible() for shown in section.locator("svg, table, details, dl").all()), name
            assert section.locator(".empty").count() == 0, name
        links = self.page.locator("nav a").all()
        assert [link.get_attribute("href") for link in links] == [f"#{name}" for name in names]

    def assert_fits(self) -> None:
        """With all unfolded, nothing is wider than the page, and no text of a chart is cut off."""
        self.unfold()
        wide = self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide[0] == wide[1]
        outside = self.page.evaluate(
            """() => [...document.querySelectorAll('main *')].filter(element => {
                const box = element.getBoundingClientRect();
                return box.width > 1 && !element.closest('.scroll table')
                    && (box.left < 0 || box.right > innerWidth + 0.5);
            }).map(element => element.outerHTML.slice(0, 200))"""
        )
        assert outside == []
        cut = self.page.evaluate(
            """() => [...document.querySelectorAll('svg text')].filter(text => {
                const box = text.getBoundingClientRect(), chart = text.closest('svg').getBoundingClientRect();
                return box.width > 0 && (box.left < chart.left - 1 || box.right > chart.right + 1
                    || box.top < chart.top - 1 || box.bottom > chart.bottom + 1);
            }).map(text => text.textContent)"""
        )
        assert cut == []

    def assert_charts_are_named(self) -> None:
        """Whoever cannot see a chart is told what it is."""
        for chart in self.page.locator("svg.chart:visible").all():
            assert chart.get_attribute("role") == "img"
            assert chart.locator("> title").text_content()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """``open_page(path, width, scheme)``: a file in the browser, by default on a phone in light colours."""
    pages: list[Page] = []

    def open_file(path: Path, width: int = 400, scheme: Any = "light") -> Opened:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        result = Opened(page, [], [])
        page.on("request", lambda sent: result.requests.append(sent.url))
        page.on("console", lambda message: result.complaints.append(message.text))
        page.on("pageerror", lambda error: result.complaints.append(str(error)))
        page.goto(path.as_uri())
        return result

    yield open_file
    for page in pages:
        page.close()


@pytest.fixture(params=[(1100, "light"), (400, "light"), (400, "dark")], ids=["desk", "phone", "dark phone"])
def open_in_view(request: pytest.FixtureRequest, open_page: Callable[..., Opened]) -> Callable[[Path], Opened]:
    """``open_in_view(path)``: a file at the width and in the colours that the test runs with; it runs with each."""
    return lambda path: open_page(path, *request.param)
