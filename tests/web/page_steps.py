"""What a person does on the pages, in a browser of Playwright."""

from typing import Any

from playwright.sync_api import Page, expect


def open_item(visit: Any, batch: str) -> Page:
    page: Page = visit.open(f"/label?batch={batch}")
    expect(page.locator("#work")).to_be_visible()
    return page


def press(page: Page, *keys: str) -> None:
    """Presses keys; after one that answers an item, waits for the next item or the end."""
    for key in keys:
        page.keyboard.press(key)


def answer(page: Page, *keys: str) -> None:
    """Presses keys that answer an item, and waits until another one, or none, is shown and everything is stored."""
    before = page.get_attribute("#item", "data-item")
    press(page, *keys)
    page.wait_for_function("before => document.getElementById('item').dataset.item !== before", arg=before)
    expect(page.locator("#state")).to_have_text("")


def focus_link(page: Page, name: str) -> None:
    for _ in range(30):
        press(page, "Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == name:
            return
    raise AssertionError(f"no link {name} is reached by Tab")


def given(live: Any, batch: str) -> dict[str, list[tuple[str, str, Any, str | None]]]:
    return {
        item.record: [(each.annotator, each.status, each.answer, each.note) for each in item.answers]
        for item in live.queue.items(batch)
    }


def answer_review(page: Page, key: str) -> None:
    before = page.get_attribute("#item", "data-item")
    press(page, key)
    page.wait_for_function("before => document.getElementById('item').dataset.item !== before", arg=before)
