"""Charts in a real browser: each is drawn, under the policy of the server, and can be hovered, zoomed and saved."""

import dataclasses
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup
from playwright.sync_api import Browser, Page

from posttrain.report.charts.bars import bars, count_rows, funnel, paired_bars, stacked_bars
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.curve import Annotation, CurveStyle, curve
from posttrain.report.charts.heat_map import heat_map, strips
from posttrain.report.charts.histogram import histogram
from posttrain.report.charts.lineage import LineageNode, lineage
from posttrain.report.charts.rounds import CurvePoint, Expectation, expectations, learning_curve_chart
from posttrain.report.charts.scatter import ScatterLayer, scatter

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'><!--<script>{b|x} $blue"
_STEPS = np.arange(200, dtype=np.float64)
_STYLE = CurveStyle("{:.3g}".format)


def _charts() -> dict[str, Chart | None]:
    """One chart of each kind, with texts as a record may have them."""
    noise = np.random.default_rng(0).random(200)
    nodes = [LineageNode(HOSTILE, HOSTILE, "file"), LineageNode("m", "round 1", "model", True)]
    points = [
        CurvePoint("round 0", "0 labels", 0.2, (0.2,), "baseline", random_baseline=0.1),
        CurvePoint("round 1", "48 labels", 0.6, (0.6,), "deploy", HOSTILE, (0.5, 0.7), 0.3),
        CurvePoint("round 2", "96 labels", 0.4, (0.6, None), "refuse"),
    ]
    layers = [
        ScatterLayer("pool", np.random.default_rng(1).random((300, 2)), "$gray", "dot"),
        ScatterLayer(HOSTILE, np.array([[0.5, 0.5]]), "$s0", "diamond", [HOSTILE]),
    ]
    return {
        "bars": bars([*count_rows([(HOSTILE, 4), ("b", 2)])], HOSTILE, marks=((1, "one"), (3, "three"))),
        "stacked": stacked_bars([("r0", {"train": 30.0, HOSTILE: 4.0})], ["train", HOSTILE], "time"),
        "paired": paired_bars([(HOSTILE, 0.2, 0.4), ("c", 0.0, 0.1)], "shares", "{:.0%}".format),
        "funnel": funnel(200, [(HOSTILE, 50), ("augmented", -20)], "records"),
        "histogram": histogram([0, 1, 2, 4], [8, 4, 2], HOSTILE, str, part=[2, 0, 1]),
        "curve": curve(_STEPS, noise, HOSTILE, _STYLE, marks=[Annotation(50, 1, HOSTILE)]),
        "strips": strips(_STEPS, {HOSTILE: noise + 0.1, "layers.1": noise + 1}, "norm"),
        "heat map": heat_map({(HOSTILE, "b"): 3}, [HOSTILE, "b"], [HOSTILE, "b"], "confusion"),
        "lineage": lineage(nodes, [(HOSTILE, "m")], "lineage"),
        "learning curve": learning_curve_chart(points, "accuracy", measure="accuracy"),
        "expectations": expectations([Expectation(HOSTILE, 4.0, 2.0, 6.0, 8.0)], "gains", "{:+g}".format),
        "scatter": scatter(layers, "map"),
    }


CHARTS = _charts()


class _Handler(SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", "default-src 'self'")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@dataclasses.dataclass
class Served:
    """A served page, its messages on the console, and its requests."""

    page: Page
    messages: list[str]
    requests: list[str]

    def figure(self, name: str) -> Any:
        """The figure of a chart."""
        return self.page.locator(f"#{name.replace(' ', '-')} figure")

    def wait_until(self, expression: str) -> None:
        """Wait for an expression of the page; Playwright's own way needs ``eval``, which the policy forbids."""
        for _ in range(100):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}; {self.messages}")

    def option(self, name: str, expression: str) -> Any:
        """An expression of the chart's present option."""
        figure = self.figure(name).element_handle()
        script = f"figure => (option => {expression})(posttrainCharts.drawn.get(figure).chart.getOption())"
        return self.page.evaluate(script, figure)


@pytest.fixture
def serve(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """``serve(names, width, scheme)``: charts in a page of a server with the policy ``default-src 'self'``."""
    (tmp_path / "static").symlink_to(str(files("posttrain.web").joinpath("static")))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    pages: list[Page] = []

    def open_charts(
        names: Sequence[str] = tuple(CHARTS), width: int = 1100, scheme: Any = "light", opened: bool = True, **how: Any
    ) -> Served:
        body = Markup().join(
            Markup('<details {} id="{}"><summary>{}</summary>{}</details>').format(
                "open" if opened else "", name.replace(" ", "-"), name, CHARTS[name]
            )
            for name in names
        )
        (tmp_path / "page.html").write_text(
            '<!doctype html><meta charset="utf-8"><link rel="icon" href="/static/icon.svg">'
            '<meta name="viewport" content="width=device-width"><title>charts</title>'
            f'<link rel="stylesheet" href="/static/charts.css">{body}'
            '<script src="/static/echarts/echarts.min.js"></script><script src="/static/charts.js"></script>',
            encoding="utf-8",
        )
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **how)
        pages.append(page)
        served = Served(page, [], [])
        page.on("console", lambda message: served.messages.append(message.text))
        page.on("pageerror", lambda error: served.messages.append(str(error)))
        page.on("request", lambda request: served.requests.append(request.url))
        page.goto(f"http://127.0.0.1:{server.server_port}/page.html")
        served.wait_until(f"posttrainCharts.drawn.size === {len(names) if opened else 0}")
        page.wait_for_timeout(350)  # the first drawing moves for a quarter of a second
        return served

    yield open_charts
    for page in pages:
        page.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), pytest.param(390, "dark", marks=pytest.mark.long)])
def test_every_kind_of_chart_is_drawn_under_a_strict_policy(
    serve: Callable[..., Served], width: int, scheme: str
) -> None:
    served = serve(width=width, scheme=scheme)
    assert served.messages == []
    host = served.page.url.rsplit("/", 1)[0]
    assert all(url.startswith(host) for url in served.requests)
    assert served.page.evaluate("typeof hacked") == "undefined"
    for name, chart in CHARTS.items():
        assert chart is not None
        figure = served.figure(name)
        box = figure.locator(".plot > div svg").bounding_box()
        assert box["width"] == pytest.approx(figure.bounding_box()["width"], abs=1), name
        assert box["height"] >= chart.height, name
        assert figure.locator(".plot").get_attribute("aria-label") == chart.title
        assert figure.locator(".plot").get_attribute("role") == "img"
        assert figure.locator(".plot svg path").count() > 2, name
    widths = served.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    cut_off = served.page.evaluate(
        """() => [...document.querySelectorAll('svg text')].filter(text => {
            const box = text.getBoundingClientRect(), chart = text.closest('svg').getBoundingClientRect();
            return box.width > 0 && (box.left < chart.left - 1 || box.right > chart.right + 1
                || box.top < chart.top - 1 || box.bottom > chart.bottom + 1);
        }).map(text => text.textContent)"""
    )
    assert cut_off == []


def test_numbers_of_the_option_are_the_lengths_on_the_screen(serve: Callable[..., Served]) -> None:
    served = serve(["bars", "histogram"])

    def sizes(name: str, colour: str) -> list[list[float]]:
        fill = served.page.evaluate(
            f"getComputedStyle(document.querySelector('figure')).getPropertyValue('--{colour}')"
        )
        boxes: list[list[float]] = (
            served.figure(name)
            .locator(f'svg path[fill="{fill.strip()}"]')
            .evaluate_all("paths => paths.map(path => path.getBBox()).map(box => [box.width, box.height])")
        )
        return boxes

    first, second = (width for width, _ in sizes("bars", "blue"))
    assert first == pytest.approx(2 * second, rel=0.02)
    # The legend's swatch comes after the bars.
    (_, tallest), (_, middle), (wide, low), *_ = sizes("histogram", "old")
    assert (tallest / middle, middle / low) == pytest.approx((2, 2), rel=0.05)
    assert wide == pytest.approx(2 * sizes("histogram", "old")[0][0], rel=0.05)


def test_a_pointer_shows_the_tooltip_and_texts_of_records_stay_texts(serve: Callable[..., Served]) -> None:
    served = serve(["bars", "scatter"])
    box = served.figure("bars").locator(".plot").bounding_box()
    served.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 35)
    tooltip = served.figure("bars").get_by_text(f"{HOSTILE}: 4", exact=True)
    tooltip.wait_for()
    served.figure("scatter").scroll_into_view_if_needed()
    middle = served.figure("scatter").locator(".plot svg").bounding_box()
    point = served.option("scatter", "option.series[1].data[0].value")
    assert point == [500, 500] or len(point) == 2
    fill = served.page.evaluate("getComputedStyle(document.querySelector('figure')).getPropertyValue('--s0').trim()")
    mark = served.figure("scatter").locator(f'svg path[fill="{fill}"]').first.bounding_box()
    assert middle["x"] < mark["x"]
    served.page.mouse.move(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
    served.figure("scatter").get_by_text(HOSTILE, exact=True).first.wait_for()
    assert served.page.evaluate("typeof hacked") == "undefined"
    assert served.page.locator("figure img").count() == 0
    assert served.messages == [], "the tooltip needs no inline style either"


def test_curves_are_zoomed_by_control_and_the_wheel_and_by_keys(serve: Callable[..., Served]) -> None:
    served = serve(["curve"])
    plot = served.figure("curve").locator(".plot")
    box = plot.bounding_box()

    def shown() -> tuple[float, float]:
        start, end = served.option("curve", "[option.dataZoom[0].start, option.dataZoom[0].end]")
        return start, end

    served.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    served.page.mouse.wheel(0, -240)
    served.page.wait_for_timeout(150)
    assert shown() == (0, 100), "the wheel alone scrolls the page"
    served.page.keyboard.down("Control")
    served.page.mouse.wheel(0, -240)
    served.page.keyboard.up("Control")
    served.page.wait_for_timeout(150)
    wheeled = shown()
    assert 0 < wheeled[0] < wheeled[1] < 100
    plot.focus()
    served.page.keyboard.press("0")
    assert shown() == (0, 100)
    served.page.keyboard.press("+")
    assert shown() == (25, 75)
    served.page.keyboard.press("ArrowRight")
    assert shown() == (37.5, 87.5)
    served.page.keyboard.press("ArrowRight")
    served.page.keyboard.press("ArrowRight")
    assert shown() == (50, 100)
    served.page.keyboard.press("-")
    assert shown() == (0, 100)


def test_colours_follow_the_scheme_and_the_size_follows_the_window(serve: Callable[..., Served]) -> None:
    served = serve(["bars"])
    figure = served.figure("bars")
    assert figure.locator('svg path[fill="#0f6cbd"]').count() == 2
    served.page.emulate_media(color_scheme="dark")
    figure.locator('svg path[fill="#58b1f5"]').first.wait_for()
    assert figure.locator('svg path[fill="#0f6cbd"]').count() == 0
    served.page.set_viewport_size({"width": 500, "height": 900})
    served.wait_until("document.querySelector('.plot svg').getBoundingClientRect().width < 500")
    assert served.messages == []


@pytest.mark.parametrize(("motion", "animated"), [("reduce", False), ("no-preference", True)])
def test_nothing_moves_for_readers_who_prefer_that(serve: Callable[..., Served], motion: str, animated: bool) -> None:
    served = serve(["bars", "curve"], reduced_motion=motion)
    for name in ("bars", "curve"):
        assert set(served.option(name, "option.series.map(series => series.animation)")) == {animated}


def test_a_chart_in_closed_details_is_drawn_when_they_open(serve: Callable[..., Served]) -> None:
    served = serve(["bars"], opened=False)
    assert served.page.locator("svg").count() == 0
    served.page.locator("#bars > summary").click()
    served.figure("bars").locator(".plot svg").wait_for()
    assert served.messages == []


def test_the_numbers_stand_in_a_table_and_the_picture_can_be_saved(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve(["heat map"])
    figure = served.figure("heat map")
    assert not figure.locator("table").is_visible()
    figure.locator("details.data > summary").focus()
    served.page.keyboard.press("Enter")
    assert figure.locator("tbody tr").first.locator("td").all_inner_texts() == [HOSTILE, "0", "3"]
    with served.page.expect_download() as download:
        figure.get_by_role("button", name="Save the picture as SVG").click()
    download.value.save_as(tmp_path / "saved.svg")
    assert download.value.suggested_filename == "chart.svg"
    saved = ElementTree.parse(tmp_path / "saved.svg").getroot()
    assert saved.tag == "{http://www.w3.org/2000/svg}svg"
    assert "3" in ["".join(text.itertext()) for text in saved.iter("{http://www.w3.org/2000/svg}text")]
    assert served.messages == []


def test_without_scripts_the_tables_remain(serve: Callable[..., Served], browser: Browser) -> None:
    served = serve(["bars"])
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(served.page.url)
    page.locator("details.data > summary").click()
    assert page.locator("td").all_inner_texts() == [HOSTILE, "4", "b", "2"]
    context.close()
