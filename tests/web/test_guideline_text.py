"""The lines in which two versions of a guideline differ, and how long it takes to find them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.web.guideline_text import _equal_blocks, compare, render_markdown

LINES = st.lists(st.sampled_from(["a", "b", "c", "dd", "", "e f"]), max_size=30)


@given(LINES, LINES)
def test_what_stays_is_in_both_and_in_order(before: list[str], after: list[str]) -> None:
    at = new_at = 0
    for start, new_start, size in _equal_blocks(before, after):
        assert size > 0
        assert start >= at
        assert new_start >= new_at
        assert before[start : start + size] == after[new_start : new_start + size]
        at, new_at = start + size, new_start + size


@given(LINES, LINES, st.lists(st.text("xyz", min_size=3), unique=True, max_size=5))
def test_a_change_within_a_text_shows_that_change_alone(head: list[str], tail: list[str], new: list[str]) -> None:
    lines = compare("\n".join([*head, "the line", *tail]), "\n".join([*head, "the line", *new, *tail]))
    changed = [(line.kind, line.text) for line in lines if line.kind in ("added", "removed")]
    assert changed == [("added", text) for text in new]


def test_versions_are_shown_with_their_context() -> None:
    lines = compare("\n".join("abcdefgh"), "\n".join("abcdxfgh"))
    shown = [(line.kind, line.text) for line in lines]
    same = [("same", "c"), ("same", "d")]
    assert shown == [
        *(("gap", "2"), *same, ("removed", "e"), ("added", "x")),
        *(("same", text) for text in "fgh"),
    ]
    assert [line.kind for line in compare("a\nb", "a\nb")] == ["gap"]
    assert compare("", "") == []


@pytest.mark.timeout(60)  # 40 minutes, where each line was compared with each
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a\n" * 4000, "a\n" * 4000),
        ("x\n" + "a\n" * 100_000, "y\n" + "a\n" * 99_000 + "z"),
        ("a\nb\n" * 50_000, "b\na\nb\n" * 33_000),
        ("\n".join(f"{at}\nb\nc\nb" for at in range(20_000)), "\n".join(f"{at}\nc\nb\nc" for at in range(20_000))),
        ("\n".join(map(str, range(30_000))), "\n".join(map(str, range(30_000, 0, -1)))),
    ],
    ids=["equal", "nearly equal", "two lines", "between anchors", "reversed"],
)
def test_the_longest_texts_are_compared(old: str, new: str) -> None:
    kinds = {line.kind for line in compare(old, new)}
    assert bool(kinds & {"added", "removed"}) is (old != new)


def test_a_guideline_runs_nothing_and_loads_nothing() -> None:
    text = "<script>a()</script>\n\nb <b onclick=a>c</b> ![d](https://e/f.png) [g](javascript:a) [h](https://i)"
    html = render_markdown(text)
    assert not any(start in html for start in ("<script", "<b", "<img", 'href="javascript'))
    assert '<a href="https://i" rel="noopener noreferrer nofollow" target="_blank">h</a>' in html
