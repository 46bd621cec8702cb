"""The page of labelling in a real browser on the real server: by keyboard alone, each kind, and what may go wrong."""

import json
from typing import Any

import pytest
from page_steps import answer, answer_review, focus_link, given, open_item, press
from playwright.sync_api import expect
from sample_batches import ANSWERS, INTENTS, KINDS, add_kind, many_labels, messages

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import QueueConfig

pytestmark = pytest.mark.slow


@pytest.mark.each_change
def test_a_batch_is_labelled_and_adjudicated_by_keyboard_alone(live: Any) -> None:
    queue = Queue(live.store.metadata, QueueConfig(overlap=2, check=0.0))
    queue.add_batch("keys", "choice", messages(6), labels=INTENTS)
    visits = [live.visit("anna"), live.visit("ben")]
    anna, ben = (visit.page for visit in visits)
    focus_link(anna, "Label")
    press(anna, "Enter")
    expect(anna.locator("#work")).to_be_visible()
    answer(anna, "Enter")
    answer(anna, "2")
    answer(anna, "1")
    press(anna, "u")  # of the item that got "1"
    expect(anna.locator("#message")).to_have_text("Your last answer is taken back.")
    answer(anna, "Enter")
    press(anna, "s")
    expect(anna.locator("#skip-dialog")).to_be_visible()
    press(anna, "2")
    answer(anna, "Enter")
    press(anna, "f")
    expect(anna.locator("#flag-dialog")).to_be_visible()
    anna.keyboard.type("two wishes")
    answer(anna, "Enter")
    answer(anna, "Enter")
    expect(anna.locator("#empty-title")).to_have_text("Nothing left for now")
    open_item(visits[1], "keys")
    while ben.locator("#work").is_visible():
        answer(ben, "6")
    right = [item.suggestion["answer"] for item in messages(6) if item.suggestion]
    assert [rows[0] for rows in given(live, "keys").values()] == [
        ("anna", "answered", right[0], None),
        ("anna", "answered", INTENTS[1], None),
        ("anna", "answered", right[2], None),
        ("anna", "skipped", None, "The right label is missing"),
        ("anna", "flagged", None, "two wishes"),
        ("anna", "answered", right[5], None),
    ]
    seconds = [each.seconds for item in live.queue.items("keys") for each in item.answers]
    assert all(0 < value < 60 for value in seconds)

    # Who disagrees is asked once more: chloe, by the same keys.
    chloe = live.visit("chloe")
    open_item(chloe, "keys")
    while chloe.page.locator("#work").is_visible():
        is_late = "Parcel said" in (chloe.page.locator("#item-content").text_content() or "")
        answer(chloe.page, "6" if is_late else "5")
    rosa = live.visit("rosa")
    focus_link(rosa.page, "Review")
    press(rosa.page, "Enter")
    expect(rosa.page.locator("#work")).to_be_visible()
    left = len(queue.review_list("keys"))
    assert left == 4
    press(rosa.page, "1", "n")
    rosa.page.keyboard.type("the first wish counts")
    decided = int(rosa.page.get_attribute("#item", "data-item") or 0)
    answer_review(rosa.page, "Enter")
    resolution = live.queue.item(decided).resolution
    assert (resolution["how"], resolution["by"], resolution["note"]) == ("review", ["rosa"], "the first wish counts")
    assert resolution["answer"] == live.queue.item(decided).answers[0].answer
    press(rosa.page, "d")
    rosa.page.keyboard.type("cannot be labelled")
    answer_review(rosa.page, "Enter")
    for _ in range(left - 2):
        press(rosa.page, "1")
        answer_review(rosa.page, "Enter")
    expect(rosa.page.locator("#empty-title")).to_have_text("Nothing to decide")
    progress = live.queue.progress("keys")
    assert (progress.done, progress.dropped, progress.left) == (5, 1, 0)
    live.queue.finish_batch("keys")
    for visit in (*visits, chloe, rosa):
        visit.assert_quiet()


BY_KEYS: dict[str, tuple[list[str], Any]] = {
    "choice": (["3"], "refund_status"),
    # The suggestion, charged_twice, stands already.
    "choices": (["6", "1", "1", "Enter"], ["charged_twice", "late_delivery"]),
    "text": (["text:It comes tomorrow.", "Control+Enter"], "It comes tomorrow."),
    # 👋 is one character for us and two for the browser.
    "spans": (
        ["Tab", "ArrowRight", "ArrowRight", "Shift+ArrowRight", "1", *["ArrowRight"] * 5, "2", "Enter"],
        [{"start": 2, "end": 12, "label": "person"}, {"start": 33, "end": 39, "label": "city"}],
    ),
    "rewrite": (["Control+End", "text: Sorry!", "Control+Enter"], ANSWERS[1] + " Sorry!"),
    "rating": (["4"], 4),
    "preference": (["2"], 1),
    "ranking": (["2", "1", "Backspace", "3", "1", "Enter"], [1, 2, 0]),
    "conversation": (
        ["text:It comes tomorrow.", "Control+Enter"],
        [{"role": "assistant", "content": "It comes tomorrow."}],
    ),
}


def test_each_kind_is_answered_by_keyboard(live: Any) -> None:
    visit = live.visit("anna")
    for kind, (keys, expected) in BY_KEYS.items():
        add_kind(live.queue, kind)
        page = open_item(visit, kind)
        for key in keys[:-1]:
            if key.startswith("text:"):
                page.keyboard.type(key[5:])
            else:
                press(page, key)
        answer(page, keys[-1])
        expect(page.locator("#empty")).to_be_visible()
        assert [rows[0][2] for rows in given(live, kind).values()] == [expected], kind
    assert set(BY_KEYS) == set(KINDS)
    visit.assert_quiet()


def test_an_answer_without_a_mark_is_asked_for_twice(live: Any) -> None:
    add_kind(live.queue, "spans", "nothing")
    visit = live.visit("anna")
    page = open_item(visit, "nothing")
    press(page, "Enter")
    expect(page.locator("#message")).to_have_text("Nothing is marked. Answer again if none applies.")
    assert list(given(live, "nothing").values()) == [[]]
    answer(page, "Enter")
    assert [rows[0][2] for rows in given(live, "nothing").values()] == [[]]


def test_parts_are_marked_with_the_pointer(live: Any) -> None:
    add_kind(live.queue, "spans", "pointer")
    visit = live.visit("anna")
    page = open_item(visit, "pointer")
    page.locator(".markable").evaluate(
        """field => {
            const node = field.firstChild, at = node.data.indexOf('Berlin'), range = document.createRange();
            range.setStart(node, at); range.setEnd(node, at + 6);
            getSelection().addRange(range);
            field.dispatchEvent(new PointerEvent('pointerup', {bubbles: true}));
        }"""
    )
    page.get_by_role("button", name="city").click()
    page.locator("#submit").click()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator("#state")).to_have_text("")
    text = KINDS["spans"][0]["text"]
    (rows,) = given(live, "pointer").values()
    assert rows[0][2] == [{"start": text.index("Berlin"), "end": text.index("Berlin") + 6, "label": "city"}]
    visit.assert_quiet()


def test_one_of_77_labels_is_searched(live: Any) -> None:
    live.queue.add_batch("many", "choice", messages(3, suggestion=None), labels=many_labels())
    visit = live.visit("anna")
    page = open_item(visit, "many")
    box = page.get_by_role("combobox", name="Find a label")
    press(page, "/")
    expect(box).to_be_focused()
    page.keyboard.type("exch lim")
    expect(page.get_by_role("option")).to_have_text(["1exchange_limit"])
    answer(page, "Enter")
    press(page, "/")
    page.keyboard.type("refund")
    press(page, "ArrowDown", "ArrowDown")
    active = page.locator(f"#{box.get_attribute('aria-activedescendant')}")
    expect(active).to_contain_text("refund_limit")
    answer(page, "Enter")
    press(page, "/")
    page.keyboard.type("pin")
    answer(page, "2")
    assert [rows[0][2] for rows in given(live, "many").values()] == ["exchange_limit", "refund_limit", "pin_late"]
    visit.assert_quiet()


def test_keys_without_a_modifier_can_be_switched_off(live: Any) -> None:
    live.queue.add_batch("modifier", "choice", messages(2), labels=INTENTS)
    visit = live.visit("anna")
    page = open_item(visit, "modifier")
    press(page, "?")
    page.get_by_label("Keys without Ctrl are commands").uncheck()
    press(page, "Escape")
    page.reload()
    expect(page.locator("#work")).to_be_visible()
    before = page.get_attribute("#item", "data-item")
    press(page, "1", "s", "f", "u")
    assert page.locator("dialog[open]").count() == 0
    assert page.get_attribute("#item", "data-item") == before
    answer(page, "Control+Enter")
    assert [len(rows) for rows in given(live, "modifier").values()] == [1, 0]


def test_time_is_counted_while_the_tab_is_seen(live: Any) -> None:
    live.queue.add_batch("time", "choice", messages(1), labels=INTENTS)
    page = open_item(live.visit("anna"), "time")
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(hide, True)
    page.wait_for_timeout(2500)
    page.evaluate(hide, False)
    answer(page, "1")
    ((item,),) = [live.queue.items("time")]
    assert item.answers[0].seconds < 2


VIEWS = [(1200, "light"), (390, "dark")]  # both widths and both colours


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_axe_finds_nothing_on_any_kind(live: Any, width: int, scheme: str) -> None:
    visit = live.visit("chloe", width, scheme)
    names = []
    # The wide page has the same parts: a few kinds stand for all.
    for kind in KINDS if width < 600 else ("choice", "spans", "ranking"):
        names.append(f"axe-{kind}-{width}-{scheme}")
        add_kind(live.queue, kind, names[-1])
    names.append(f"axe-many-{width}-{scheme}")
    live.queue.add_batch(names[-1], "choice", messages(1), labels=many_labels())
    for name in names:
        page = open_item(visit, name)
        visit.assert_accessible()
        visit.assert_fits()
    for key in ("s", "f", "?"):
        press(page, "Escape", key)
        expect(page.locator("dialog[open]")).to_be_visible()
        visit.assert_accessible()
    press(page, "Escape")
    visit.open("/label?batch=nothing")
    visit.assert_accessible()
    visit.errors.clear()  # the batch is unknown, which the console says too


def test_what_else_is_known_of_a_record_is_shown_where_it_is_opened(live: Any) -> None:
    live.queue.add_batch("meta", "choice", messages(1), labels=INTENTS)
    visit = live.visit("anna")
    page = open_item(visit, "meta")
    page.get_by_text("More about this record").click()
    facts = page.locator("#item-content dl")
    assert facts.locator("dt").all_inner_texts() == ["channel", "order"]
    assert facts.locator("dd").all_inner_texts() == ["mail", "5500"]
    visit.assert_accessible()


def test_the_page_is_chinese_for_who_reads_chinese(live: Any) -> None:
    live.queue.add_batch("zh", "choice", messages(1), labels=INTENTS)
    visit = live.visit("anna", language="zh")
    page = open_item(visit, "zh")
    expect(page.locator("#kind")).to_have_text("选择一个标签")
    visible = page.locator("main").inner_text()
    assert "Accept" not in visible
    assert "Suggestion" not in visible
    visit.assert_accessible()
    assert json.loads(page.get_attribute(".labelling", "data-texts") or "")["skip"] == "跳过"


@pytest.mark.parametrize("width", [1200, 390])
def test_a_label_breaks_between_its_words(live: Any, width: int) -> None:
    labels = [
        "Refund_not_showing_up",
        "wrong_exchange_rate_for_cash_withdrawal",
        "card payment fee charged twice",
        "no",
    ]
    live.queue.add_batch(f"breaks-{width}", "choice", messages(1, suggestion=None), labels=labels)
    page = open_item(live.visit("anna", width), f"breaks-{width}")
    lines = page.locator(".option > span:last-of-type").evaluate_all(
        """spans => spans.map((span) => {
          const lines = []; let top = null;
          const walker = document.createTreeWalker(span, NodeFilter.SHOW_TEXT);
          while (walker.nextNode()) for (let at = 0; at < walker.currentNode.length; at++) {
            const range = document.createRange();
            range.setStart(walker.currentNode, at); range.setEnd(walker.currentNode, at + 1);
            const box = range.getBoundingClientRect(), letter = walker.currentNode.data[at];
            if (top === null || Math.abs(box.top - top) > 4) { lines.push(""); top = box.top; }
            lines[lines.length - 1] += letter;
          }
          return lines;
        })"""
    )
    assert ["".join(each) for each in lines] == labels
    assert any(len(each) > 1 for each in lines)
    for each in lines:
        assert all(line.rstrip(" ")[-1:] == "_" or line.endswith(" ") for line in each[:-1]), each
