"""The pages of review and of the guideline in a real browser, and what they ask of the API."""

import re
from typing import Any

import pytest
from hypothesis import given as each
from hypothesis import strategies
from page_steps import answer_review, press
from playwright.sync_api import expect
from sample_batches import INTENTS, KINDS, add_batches, add_kind, messages

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import QueueConfig
from posttrain.web.app_page import STATIC
from posttrain.web.guideline_text import compare, render_markdown
from posttrain.web.translations import TEXTS

LINES = strategies.lists(strategies.sampled_from(["a", "b", "c", ""]), max_size=12)


@each(LINES, LINES)
def test_a_comparison_has_both_texts(old: list[str], new: list[str]) -> None:
    lines = compare("\n".join(old), "\n".join(new))
    if not any(line.kind == "gap" for line in lines):
        before, after = "\n".join(old).splitlines(), "\n".join(new).splitlines()
        assert [line.text for line in lines if line.kind != "added"] == before
        assert [line.text for line in lines if line.kind != "removed"] == after
    removed = [line.text for line in lines if line.kind == "removed"]
    added = [line.text for line in lines if line.kind == "added"]
    assert bool(removed or added) == ("\n".join(old).splitlines() != "\n".join(new).splitlines())


def test_unchanged_lines_far_from_a_change_are_left_out() -> None:
    old = [str(number) for number in range(20)]
    lines = [(line.kind, line.text) for line in compare("\n".join(old), "\n".join([*old[:19], "new"]))]
    assert lines == [("gap", "17"), ("same", "17"), ("same", "18"), ("removed", "19"), ("added", "new")]


@each(strategies.text(alphabet="<>[]()!\"'=&:/\\#*`_|- \nabcdefghijklmnopqrstuvwxyz", max_size=200))
def test_markdown_has_no_tags_of_its_own(text: str) -> None:
    html = render_markdown(text + "\n[x](javascript:a)<script>a</script><b onclick=a>")
    tags = set(re.findall(r"<(\w+)", html))
    assert not tags & {"script", "img", "iframe", "b", "style", "svg", "object", "form", "input"}
    assert not re.search(r"<[^>]* (on\w+|style|src)=", html)
    assert not re.search(r'href="\s*(javascript|data|vbscript)', html, re.IGNORECASE)


def test_scripts_name_texts_that_there_are() -> None:
    for script, prefixes in {
        "label.js": ["label."],
        "label_parts.js": ["label."],
        "label_editors.js": ["label."],
        "review.js": ["label.", "review."],
    }.items():
        with open(f"{STATIC}/{script}", encoding="utf-8") as file:
            keys = set(re.findall(r'\btext\("([\w.]+)"[,)]', file.read()))
        assert keys
        assert not {key for key in keys if not any(prefix + key in TEXTS["en"] for prefix in prefixes)}


# What each kind is answered by ben and by chloe, who disagree.
PAIRS: dict[str, tuple[Any, Any]] = {
    "choice": (INTENTS[0], INTENTS[1]),
    "choices": ([INTENTS[0]], [INTENTS[1], INTENTS[2]]),
    "text": ("Yes.", "No."),
    "spans": ([], [{"start": 2, "end": 12, "label": "person"}]),
    "rewrite": ("Yes.", "No."),
    "rating": (2, 5),
    "preference": (0, "tie"),
    "ranking": ([0, 1, 2], [2, 1, 0]),
    "conversation": (
        [{"role": "assistant", "content": "Yes."}],
        [
            {"role": "assistant", "content": "No."},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!"},
        ],
    ),
}


@pytest.mark.slow
def test_each_kind_is_decided_by_the_second_answer(live: Any) -> None:
    queue = Queue(live.store.metadata, QueueConfig(overlap=2, check=0.0))
    for kind in KINDS:
        add_kind(queue, kind, f"review-{kind}")
        for name, answer in zip(("ben", "chloe"), PAIRS[kind], strict=True):
            task = queue.next(name, f"review-{kind}")
            assert task is not None
            # One more would be asked, where a majority is possible: a flag sends it to review.
            if name == "chloe":
                queue.flag(task.item, name, "I doubt it", answer)
            else:
                queue.answer(task.item, name, answer)
    visit = live.visit("rosa")
    for kind in KINDS:
        page = visit.open(f"/review?batch=review-{kind}")
        expect(page.locator("#work")).to_be_visible()
        if kind in ("choice", "spans", "conversation"):
            visit.assert_accessible()
            page.evaluate("window.scrollTo(0, 0)")
        press(page, "2")
        answer_review(page, "Enter")
        (item,) = queue.items(f"review-{kind}")
        assert item.resolution is not None
        assert (item.status, item.resolution["answer"]) == ("done", PAIRS[kind][1]), kind
    visit.assert_quiet()


@pytest.mark.slow
def test_a_wrong_decision_is_opened_again_by_a_key_and_changed(live: Any) -> None:
    live.queue.add_batch("slip", "choice", messages(2), labels=INTENTS)
    for item in live.queue.items("slip"):
        task = live.queue.next("ben", "slip")
        live.queue.flag(task.item, "ben", "unclear", INTENTS[item.id % 2])
    visit = live.visit("rosa")
    page = visit.open("/review?batch=slip")
    expect(page.locator("#work")).to_be_visible()
    first = int(page.get_attribute("#item", "data-item") or 0)
    press(page, "1")
    answer_review(page, "Enter")
    expect(page.locator("#message")).to_have_text("Decided Change it")
    press(page, "u")
    page.wait_for_url(f"**/review?item={first}")
    expect(page.locator("#cause")).to_contain_text("Decided by rosa")
    press(page, "/")
    page.get_by_role("button", name=INTENTS[4]).click()
    press(page, "Escape", "Enter")
    expect(page.locator("#message")).to_have_text("Decided")
    resolution = live.queue.item(first).resolution
    assert resolution is not None
    assert resolution["answer"] == INTENTS[4]
    visit.assert_quiet()


@pytest.mark.slow
def test_a_new_guideline_lists_the_labels_to_look_at_again(lone: Any) -> None:
    visit = lone.visit("rosa")
    page = visit.open("/guidelines")
    page.get_by_label("Text, in Markdown").fill("# Rules\n\nRead *twice*.")
    page.get_by_role("button", name="Save as version 1").click()
    expect(page.locator(".markdown em")).to_have_text("twice")
    lone.queue.add_batch("b", "choice", messages(2), labels=INTENTS)
    task = lone.queue.next("anna")
    lone.queue.answer(task.item, "anna", "card_declined")
    page.get_by_label("Text, in Markdown").fill("# Rules\n\nRead *three times*.")
    page.get_by_label("What has changed").fill("twice was too little")
    page.get_by_role("button", name="Save as version 2").click()
    expect(page.locator(".diff ins")).to_contain_text("Read *three times*.")
    expect(page.locator(".diff del")).to_contain_text("Read *twice*.")
    expect(page.locator(".versions")).to_contain_text("twice was too little")
    assert [row["version"] for row in lone.queue.guidelines()] == [1, 2]
    page.get_by_role("link", name="m0000").click()
    expect(page.locator("#work")).to_be_visible()
    press(page, "/")
    page.get_by_role("button", name="order_status").click()
    page.locator("#decide").click()
    expect(page.locator("#message")).to_have_text("Decided")
    assert lone.queue.item(task.item).resolution["answer"] == "order_status"
    visit.assert_quiet()
    viewer = lone.visit("anna")
    page = viewer.open("/guidelines")
    expect(page.locator(".markdown em")).to_have_text("three times")
    assert page.locator("#write, table").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1200, "dark"), (390, "light")])
def test_axe_finds_nothing_on_review_and_guideline(live: Any, width: int, scheme: str) -> None:
    if live.queue.batch("round-3") is None:
        add_batches(live.store)
    visit = live.visit("rosa", width, scheme)
    page = visit.open("/review?batch=round-3")
    expect(page.locator("#posterior")).to_be_visible()
    for key in ("2", "d", "?"):
        press(page, "Escape", key)
        visit.assert_accessible()
        visit.assert_fits()
    for path in ("/review?batch=nothing", "/guidelines", "/guidelines?old=1&new=2") if width < 600 else ():
        visit.open(path).wait_for_load_state("networkidle")
        visit.assert_accessible()
        visit.assert_fits()
    visit.assert_quiet()
