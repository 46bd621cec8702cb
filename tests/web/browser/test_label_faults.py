"""What may go wrong on the page of labelling: hostile texts, a lost connection, an ended session, a pause."""

from typing import Any

import pytest
from page_steps import answer, given, open_item, press
from playwright.sync_api import expect
from sample_batches import INTENTS, KINDS, PASSWORD, messages

from posttrain.label.accounts import Accounts
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem, QueueConfig

pytestmark = pytest.mark.slow


def test_nobody_sees_another_ones_answer(live: Any) -> None:
    queue = Queue(live.store.metadata, QueueConfig(overlap=2, check=0.0))
    queue.add_batch("blind", "choice", messages(2), labels=INTENTS)
    for _ in range(2):
        task = queue.next("ben", "blind")
        assert task is not None
        queue.answer(task.item, "ben", "late_delivery", note="secret remark of ben")
    visit = live.visit("anna")
    seen: list[str] = []
    visit.page.on("response", lambda response: seen.append(response.text()) if response.status < 300 else None)
    page = open_item(visit, "blind")
    answer(page, "1")
    expect(page.locator("#progress")).to_contain_text("blind")
    everything = "".join(seen) + page.content()
    assert "I sent the shoes back" in everything
    assert "secret remark" not in everything
    assert '"ben"' not in everything


def test_text_of_records_labels_notes_and_guideline_stays_text(lone: Any) -> None:
    hostile = "</script><img src=x onerror='hacked = 1'><script>hacked = 1</script>{{ 7 * 7 }} \" ' onfocus=hacked=1"
    labels = [hostile, "good"]
    queue = Queue(lone.store.metadata, QueueConfig(overlap=2, check=0.0))
    queue.add_guideline(f"first\n\n{hostile}", "rosa", hostile)
    link = (
        "[a](javascript:hacked=1) ![b](https://elsewhere.example/x.png) [c](data:text/html,<script>hacked=1</script>)"
    )
    queue.add_guideline(f"{hostile}\n\n{link}\n\n```\n{hostile}\n```", "rosa", hostile)
    for kind, (content, kind_labels, _) in KINDS.items():
        spoilt = {
            "meta": {hostile: hostile},
            **{name: hostile for name in ("text", "answer") if name in content},
            **({"prompt": [{"role": "user", "content": hostile}]} if "prompt" in content else {}),
            **(
                {"candidates": [hostile, f"2 {hostile}", "3"][: len(content["candidates"])]}
                if "candidates" in content
                else {}
            ),
        }
        suggestion = {"answer": hostile, "confidence": 0.5, "annotator": hostile} if kind == "choice" else None
        items = [NewItem(f"{kind} {hostile}"[:90], spoilt, suggestion=suggestion, reason=hostile)]
        name = f"{kind} {hostile}"
        queue.add_batch(name, kind, items, labels=labels if kind_labels else None)
        task = queue.next("ben", name)
        assert task is not None
        queue.flag(task.item, "ben", hostile, hostile if kind in ("choice", "text", "rewrite") else None)
        task = queue.next("anna", name)
    anna = lone.visit("anna")
    for kind in KINDS:
        page = anna.page
        page.goto("/label?" + encode(batch=f"{kind} {hostile}"))
        # Flagged items are the reviewer's: anna still holds hers.
        page.wait_for_timeout(200)
        anna.assert_quiet()
    rosa = lone.visit("rosa")
    page = rosa.open("/review")
    expect(page.locator("#work")).to_be_visible()
    for _ in KINDS:
        press(page, "1", "/")
        press(page, "Escape", "j")
        rosa.assert_quiet()
    assert hostile in (page.locator("#work").text_content() or "")
    page = rosa.open("/guidelines?old=1&new=2")
    assert hostile[:9] in (page.locator(".markdown").text_content() or "")
    assert page.locator(".markdown img").count() == 0
    links = page.locator(".markdown a").evaluate_all("links => links.map(link => [link.href, link.rel, link.target])")
    assert links == [["https://elsewhere.example/x.png", "noopener noreferrer nofollow", "_blank"]]
    rosa.assert_quiet()


def encode(**values: str) -> str:
    from urllib.parse import urlencode

    return urlencode(values)


def test_answers_given_while_the_server_is_away_are_stored_when_it_is_back(lone: Any) -> None:
    lone.queue.add_batch("away", "choice", messages(5), labels=INTENTS)
    visit = lone.visit("anna")
    page = open_item(visit, "away")
    expect(page.locator("#item[data-ahead='1']")).to_be_visible()
    expect(page.locator("#progress")).to_contain_text("away")
    port = int(lone.address.rpartition(":")[2])
    lone.kill()
    press(page, "1")  # the next item was fetched before
    press(page, "2")
    expect(page.locator("#connection")).to_contain_text("2 of your answers are kept here")
    dialogs: list[str] = []
    page.once("dialog", lambda dialog: (dialogs.append(dialog.type), dialog.dismiss()))
    page.close(run_before_unload=True)
    page.wait_for_timeout(300)
    assert dialogs == ["beforeunload"]
    lone.start(port)
    expect(page.locator("#connection")).to_be_hidden(timeout=30_000)
    expect(page.locator("#work")).to_be_visible()
    answers = [rows[0][2] if rows else None for rows in given(lone, "away").values()]
    assert answers == [INTENTS[0], INTENTS[1], None, None, None]
    answer(page, "3")
    assert [row[0][2] for row in list(given(lone, "away").values())[:3]] == INTENTS[:3]


def test_answers_outlive_the_session_and_are_sent_for_their_own_account_only(live: Any) -> None:
    live.queue.add_batch("session", "choice", messages(4), labels=INTENTS)
    visit = live.visit("anna")
    page = open_item(visit, "session")
    expect(page.locator("#progress")).to_contain_text("session")

    def sign_in(name: str) -> None:
        other = visit.page.context.new_page()
        other.goto("/")
        if other.get_by_role("button", name="Sign out").count():
            other.get_by_role("button", name="Sign out").click()
            other.wait_for_url("**/sign-in")
        other.goto("/sign-in")
        other.fill("#name", name)
        other.fill("#password", PASSWORD)
        other.press("#password", "Enter")
        other.wait_for_url(f"{live.address}/")
        other.close()

    other = page.context.new_page()
    other.goto("/")
    other.get_by_role("button", name="Sign out").click()
    other.wait_for_url("**/sign-in")
    other.close()
    press(page, "1")
    expect(page.locator("#connection")).to_contain_text("Your session has ended. Sign in as anna")
    sign_in("ben")
    expect(page.locator("#connection")).to_contain_text("Another account is signed in", timeout=20_000)
    assert not any(given(live, "session").values())
    sign_in("anna")
    expect(page.locator("#connection")).to_be_hidden(timeout=30_000)
    rows = list(given(live, "session").values())
    assert rows[0] == [("anna", "answered", INTENTS[0], None)]


def test_new_items_come_by_themselves_and_a_pause_is_shown(lone: Any) -> None:
    visit = lone.visit("anna")
    page = visit.open("/label")
    expect(page.locator("#empty-title")).to_have_text("Nothing left for now")
    lone.queue.add_batch("late", "choice", messages(3), labels=INTENTS)
    expect(page.locator("#work")).to_be_visible(timeout=20_000)
    # Else the request for the item after the first one could bring the pause before the answer.
    expect(page.locator("#item")).to_have_attribute("data-ahead", "1")
    Accounts(lone.queue.metadata).pause("anna", "Let us talk the guideline over first.", "rosa")
    answer(page, "1")
    expect(page.locator("#empty-text")).to_have_text("Let us talk the guideline over first.")
    # The answer before the pause is kept; the items that were fetched ahead go to others at once.
    for _ in range(100):  # the page may know of the pause before its answer is stored
        if lone.queue.progress("late").answers:
            break
        page.wait_for_timeout(50)
    assert lone.queue.progress("late").answers == 1
    assert lone.queue.next("ben") is not None
    Accounts(lone.queue.metadata).pause("anna", None, "rosa")
    expect(page.locator("#work")).to_be_visible(timeout=20_000)
    visit.assert_quiet()
