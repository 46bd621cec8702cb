"""A page in a real browser, and assertions for every page."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page


@dataclasses.dataclass
class LoadedPage:
    """A page in the browser, its requests, and its messages on the console."""

    page: Page
    requests: list[str]
    errors: list[str]

    def open_details(self) -> None:
        """Open all folded details."""
        self.page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        self.wait_for_charts()

    def wait_for_charts(self) -> None:
        """Wait until each visible chart is drawn and stands still."""
        undrawn = """[...document.querySelectorAll('figure.chart')]
            .filter(figure => figure.checkVisibility() && !posttrainCharts.drawn.has(figure)).length"""
        for _ in range(200):
            if not self.page.evaluate(undrawn):
                break
            self.page.wait_for_timeout(50)
        else:
            raise AssertionError(f"charts are not drawn: {self.errors}")
        self.page.wait_for_timeout(350)

    def assert_self_contained(self) -> None:
        """Assert that the page loads nothing, runs only the two scripts of the package and reports no error.

        What a content security policy forbids is an error on the console.
        """
        assert self.requests == [self.page.url]
        assert self.errors == []
        assert self.page.locator("script:not([type='application/json'])").count() == 2
        assert self.page.locator("meta[http-equiv='Content-Security-Policy']").count() == 1

    def assert_has_sections(self, names: Sequence[str]) -> None:
        """Assert that each section is there with visible content and a link to it."""
        for name in names:
            section = self.page.locator(f"section#{name}")
            assert section.locator("h2").count() == 1
            assert section.locator(".caption").is_visible()
            assert any(element.is_visible() for element in section.locator("svg, table, details, dl").all()), name
            assert section.locator(".empty").count() == 0, name
        links = self.page.locator("nav a").all()
        assert [link.get_attribute("href") for link in links] == [f"#{name}" for name in names]

    def assert_fits(self) -> None:
        """Assert that nothing is wider than the page and no text of a chart is cut off, with all details open."""
        self.open_details()
        widths = self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths[0] == widths[1]
        outside = self.page.evaluate(
            """() => [...document.querySelectorAll('main *')].filter(element => {
                const box = element.getBoundingClientRect();
                return box.width > 1 && !element.closest('.scroll table')
                    && (box.left < 0 || box.right > innerWidth + 0.5);
            }).map(element => element.outerHTML.slice(0, 200))"""
        )
        assert outside == []
        cut_off = self.page.evaluate(
            """() => [...document.querySelectorAll('svg text')].filter(text => {
                const box = text.getBoundingClientRect(), chart = text.closest('svg').getBoundingClientRect();
                return box.width > 0 && (box.left < chart.left - 1 || box.right > chart.right + 1
                    || box.top < chart.top - 1 || box.bottom > chart.bottom + 1);
            }).map(text => text.textContent)"""
        )
        assert cut_off == []

    def assert_charts_are_named(self) -> None:
        """Assert that each chart has a title for screen readers."""
        charts = self.page.locator("figure.chart:visible").all()
        assert charts
        for chart in charts:
            plot = chart.locator(".plot")
            assert plot.get_attribute("role") == "img"
            assert plot.get_attribute("aria-label")
            assert plot.locator("svg").count() == 1
            assert chart.locator("details.data").count() == 1


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., LoadedPage]]:
    """``open_page(path, width, scheme)``: a file in the browser, by default on a phone in light colours."""
    pages: list[Page] = []

    def open_file(path: Path, width: int = 400, scheme: Any = "light") -> LoadedPage:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        result = LoadedPage(page, [], [])
        page.on("request", lambda request: result.requests.append(request.url))
        page.on("console", lambda message: result.errors.append(message.text))
        page.on("pageerror", lambda error: result.errors.append(str(error)))
        page.goto(path.as_uri())
        result.wait_for_charts()
        return result

    yield open_file
    for page in pages:
        page.close()


@pytest.fixture(
    params=[
        pytest.param((1100, "light"), id="desk"),
        pytest.param((400, "dark"), id="dark phone", marks=pytest.mark.long),
    ]
)
def open_in_view(request: pytest.FixtureRequest, open_page: Callable[..., LoadedPage]) -> Callable[[Path], LoadedPage]:
    """``open_in_view(path)``: a file at the width and in the colours that the test runs with; it runs with each."""
    return lambda path: open_page(path, *request.param)
