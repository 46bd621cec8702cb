"""The pages for signing in, in a real browser: by keyboard alone, in two languages, under the strict policy."""

from collections.abc import Iterator
from typing import Any

import pytest
from accessibility import assert_accessible
from playwright.sync_api import Browser, Page

from posttrain.label.accounts import Accounts
from posttrain.store.workspace import Workspace

pytestmark = pytest.mark.slow

PASSWORD = "correct horse battery"


@pytest.fixture
def secrets(real: Any) -> dict[str, str]:
    """A running server with an owner and an annotator; the secrets of a link and an invitation."""
    with Workspace.create(real.root) as store:
        accounts = Accounts(store.metadata)
        accounts.add("olga", "owner", "terminal", PASSWORD)
        accounts.add("安娜", "annotator", "terminal", PASSWORD)
        secrets = {
            "link": accounts.tokens.issue_link("olga", "terminal"),
            "invitation": accounts.tokens.invite("reviewer", "", "olga"),
        }
    real.start()
    return secrets


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that must neither log an error nor break the policy."""
    context = browser.new_context(locale="en-US")
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    context.close()
    # Browsers log the status of an answer, too, which the tests expect.
    assert [problem for problem in problems if "Failed to load resource" not in problem] == []


def test_a_link_is_opened_and_its_secret_leaves_the_address(page: Page, real: Any, secrets: dict[str, str]) -> None:
    page.goto(f"{real.url}/sign-in?token={secrets['link']}")
    button = page.get_by_role("button", name="Continue as olga")
    button.wait_for()
    assert page.url == f"{real.url}/sign-in"
    assert page.evaluate("document.activeElement.textContent") == "Continue as olga"
    page.keyboard.press("Enter")
    page.wait_for_url(f"{real.url}/")
    assert "You are signed in as olga, owner." in page.inner_text("main")
    page.goto(f"{real.url}/sign-in?token={secrets['link']}")
    assert "was used already" in page.inner_text("[role=alert]")


def test_a_password_signs_in_by_keyboard_and_a_button_out(page: Page, real: Any, secrets: dict[str, str]) -> None:
    page.goto(f"{real.url}/")
    assert page.url == f"{real.url}/sign-in?next=/"
    page.get_by_label("Name").focus()
    page.keyboard.type("安娜")
    page.keyboard.press("Tab")
    page.keyboard.type("wrong password")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    assert page.inner_text("[role=alert]") == "The name or the password is wrong."
    assert page.get_by_label("Name").input_value() == "安娜"
    page.get_by_label("Password").focus()
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{real.url}/")
    assert page.inner_text(".person .name") == "安娜"
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(f"{real.url}/sign-in")
    page.goto(f"{real.url}/")
    assert page.url == f"{real.url}/sign-in?next=/"


def test_an_invitation_becomes_an_account(page: Page, real: Any, secrets: dict[str, str]) -> None:
    page.goto(f"{real.url}/invitation?token={secrets['invitation']}")
    assert "as reviewer" in page.inner_text("main")
    for label, text in (("Name", "rita"), ("Password", PASSWORD), ("Password again", PASSWORD)):
        page.get_by_label(label, exact=True).fill(text)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{real.url}/")
    assert "rita, reviewer" in page.inner_text("main")


def test_the_language_is_the_browsers_until_it_is_chosen(browser: Browser, real: Any, secrets: dict[str, str]) -> None:
    context = browser.new_context(locale="zh-CN")
    page = context.new_page()
    page.goto(f"{real.url}/sign-in")
    assert page.evaluate("document.documentElement.lang") == "zh"
    assert page.inner_text("h1") == "登录"
    page.get_by_role("link", name="English").click()
    assert (page.url, page.inner_text("h1")) == (f"{real.url}/sign-in", "Sign in")
    page.goto(f"{real.url}/invitation?token={secrets['invitation']}")
    assert page.inner_text("h1") == "Join"
    context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), pytest.param(360, "dark", marks=pytest.mark.long)])
def test_the_pages_are_accessible(
    browser: Browser, real: Any, secrets: dict[str, str], width: int, scheme: Any
) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = context.new_page()
    for path in (
        "/sign-in",
        f"/sign-in?token={secrets['link']}",
        f"/invitation?token={secrets['invitation']}",
        "/sign-in?token=wrong",
        None,
    ):
        if path is None:
            page.get_by_label("Name").fill("olga")
            page.get_by_label("Password").fill(PASSWORD)
            page.keyboard.press("Enter")
            page.wait_for_url(f"{real.url}/")
        else:
            page.goto(real.url + path)
        assert_accessible(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
