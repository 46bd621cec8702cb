"""The bundled library is the one that was recorded, with its licences, and texts of records cannot leave an option."""

import base64
import hashlib
import html
import json
import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.report.charts.chart import Chart
from posttrain.report.section import Page
from posttrain.web.page import SCRIPTS, render_page

_STATIC = files("posttrain.web").joinpath("static")
_BUNDLE = _STATIC.joinpath("echarts", "echarts.min.js")


def test_the_library_has_the_recorded_digest_version_and_licences() -> None:
    digest, name = _STATIC.joinpath("echarts", "SHA256SUMS").read_text("utf-8").split()
    assert (name, digest) == ("echarts.min.js", hashlib.sha256(_BUNDLE.read_bytes()).hexdigest())
    banner = _BUNDLE.read_text("utf-8").splitlines()[0]
    assert re.search(r"Apache ECharts 6\.\d+\.\d+ \(Apache-2\.0\) with zrender 6\.\d+\.\d+ \(BSD-3-Clause\)", banner)
    for license_file, text in (
        ("LICENSE", "Apache License"),
        ("NOTICE", "Apache ECharts"),
        ("LICENSE.zrender", "BSD 3-Clause"),
        ("LICENSE.tslib", "Microsoft"),
    ):
        assert text in _STATIC.joinpath("echarts", license_file).read_text("utf-8")


def test_the_scripts_can_stand_in_a_page_and_run_under_a_strict_policy() -> None:
    for name in SCRIPTS:
        text = files("posttrain.web").joinpath(*name.split("/")).read_text("utf-8")
        assert not re.search(r"</script|<!--|\beval\(|new Function\(", text)
    assert "innerHTML =" not in _STATIC.joinpath("charts.js").read_text("utf-8")


def _page() -> str:
    return render_page(Page("", "", "", [], []))


def test_the_policy_allows_the_inline_scripts_and_styles_by_their_digests_alone() -> None:
    page = _page()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    directives = dict(entry.split(" ", 1) for entry in html.unescape(policy).split("; "))
    assert directives["default-src"] == "'none'"
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        inline = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        hashes = re.findall(r"'sha256-([^']+)'", directives[directive])
        expected = [hashlib.sha256(text.encode()).digest() for text in inline]
        assert [base64.b64decode(digest) for digest in hashes] == expected
    assert "unsafe" not in policy
    assert not re.search(r' style="| on\w+="', re.sub("<script>.*?</script>", "", page, flags=re.DOTALL))


@given(st.text())
@pytest.mark.parametrize("prefix", ["", "</script>", "<!--<script>", "]]>", "\u2028", '"\\'])
def test_any_text_stands_in_an_option_and_comes_back(prefix: str, text: str) -> None:
    chart = Chart(prefix + text, {"data": [prefix + text]}, 100, ("name",), [(prefix + text,)])
    markup = chart.__html__()
    (script,) = re.findall(r'<script type="application/json">([^<]*)</script>', markup)
    assert json.loads(script)["option"] == {"data": [prefix + text]}
    assert markup.count("<script") == markup.count("</script") == 1
    assert "<!--" not in markup


def test_numbers_are_short_and_missing_ones_are_null() -> None:
    chart = Chart("", {"data": [0.1 + 0.2, 1e-9, 2.0, float("nan"), float("inf"), True]}, 100)
    (script,) = re.findall(r">(\{.*\})<", chart.__html__())
    assert '"data":[0.3,1e-09,2,null,null,true]' in script
