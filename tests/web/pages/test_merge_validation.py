"""The section of the merge page on what the merge kept has every number of the validation, and names stay text."""

import math
import re
from html import unescape

import pytest

from posttrain.evaluate.bootstrap import RatioInterval
from posttrain.evaluate.paired_interval import Interval
from posttrain.report.section import Page, Pairs, Table
from posttrain.tune.merges.validation import SuiteValidation, Validation
from posttrain.tune.merges.validation_report import validation_section
from posttrain.web.page import render_page


def suite(
    specialists: list[str], retention: RatioInterval | None, gain: Interval, best: str = "math"
) -> SuiteValidation:
    scores = {"base": 0.25, "math": 0.8, "<b>chat": 0.5, "merged": 0.75}
    return SuiteValidation(
        "token_f1", 1200, scores, specialists, retention, "math" if specialists else "base", gain, best
    )


VALIDATION = Validation(
    suites={
        "sums": suite(["math"], RatioInterval(0.9375, 0.9, 0.97, 1200), Interval(-0.05, -0.08, -0.02, 1200, 90)),
        "both": suite(
            ["math", "<b>chat"], RatioInterval(1.1, 1.02, math.inf, 1200), Interval(0.1, 0.02, 0.18, 1200, 90)
        ),
        "talk": suite([], RatioInterval(3.0, 2.5, 3.5, 1200), Interval(0.0, -0.01, 0.01, 1200, 90)),
        "zero": suite(["math"], None, Interval(0.0, 0.0, 0.0, 1200, 0)),
    },
    average_retention=RatioInterval(1.01875, 0.97, 1.06, 2400),
    preservation=RatioInterval(3.0, 2.5, 3.5, 1200),
    precision="float32",
)


WITHOUT = Validation(VALIDATION.suites, None, None, "bfloat16")


def tables(validation: Validation) -> dict[str, Table]:
    return {block.name: block for block in validation_section(validation).blocks if isinstance(block, Table)}


def headline(validation: Validation) -> list[tuple[str, str]]:
    (pairs,) = [block for block in validation_section(validation).blocks if isinstance(block, Pairs)]
    return list(pairs.rows)


def test_suites_are_split_by_whether_a_model_was_trained_for_them() -> None:
    tasks, others = (tables(VALIDATION)[name].rows for name in ("Retention by task", "Capability preserved"))
    assert [row[0] for row in tasks] == ["sums", "both", "zero"]
    assert tasks[0] == ("sums", "token F1", "1,200", "math", "0.800", "0.750", "93.8%", "90.0% to 97.0%")
    assert tasks[1][-2:] == ("110.0%", "102.0% to infinite")
    assert tasks[2][-2:] == ("–", "–")
    assert others == [("talk", "token F1", "1,200", "base", "0.250", "0.750", "300.0%", "250.0% to 350.0%")]


def test_each_cell_has_a_column() -> None:
    assert len(tables(VALIDATION)) == 3
    for table in tables(VALIDATION).values():
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_only_a_gain_beyond_its_interval_is_better_than_all() -> None:
    gains = tables(VALIDATION)["Gain over the best single model"].rows
    assert {row[0]: row[-1] for row in gains} == {"sums": "no", "both": "yes", "talk": "no", "zero": "no"}
    assert gains[1] == ("both", "math, <b>chat", "math 0.800", "0.750", "+0.100", "+0.020 to +0.180", "yes")
    assert headline(VALIDATION) == [
        ("kept of the specialists", "101.9% (97.0% to 106.0%)"),
        ("kept of the base", "300.0% (250.0% to 350.0%)"),
        ("better than every model", "both"),
    ]


def test_averages_may_be_missing() -> None:
    assert headline(WITHOUT) == [("better than every model", "both")]


@pytest.mark.parametrize("validation", [VALIDATION, WITHOUT])
def test_the_page_shows_what_was_measured(validation: Validation) -> None:
    page = render_page(Page("", "merge", "", [], [validation_section(validation)]))
    shown = unescape(re.sub("<[^>]+>", " ", page[page.index("<main") : page.index("</main>")]))
    assert "Retention by task" in shown
    assert "Gain over the best single model" in shown
    assert "math, <b>chat" in shown
    assert "<b>" not in page[page.index("<main") : page.index("</main>")]
    assert f"in {validation.precision}." in shown
