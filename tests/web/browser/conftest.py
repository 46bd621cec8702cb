"""The real server of a workspace, and people who are signed in, in a real browser."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import pytest
from accessibility import assert_accessible
from playwright.sync_api import Browser, BrowserContext, Page, expect
from sample_batches import PASSWORD, add_team
from sample_team import add_answers

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import QueueConfig
from posttrain.store.workspace import Workspace

# The machine may be busy with other tests.
expect.set_options(timeout=20_000)


@dataclass
class Visit:
    """A page, with all that its console and its content policy complained of."""

    page: Page
    errors: list[str] = field(default_factory=list)

    def open(self, path: str) -> Page:
        self.page.goto(path)
        return self.page

    def assert_quiet(self) -> None:
        """Asserts that no script failed, nothing was blocked, and no text became markup."""
        assert self.errors == []
        assert self.page.evaluate("window.hacked") is None

    def assert_accessible(self) -> None:
        # What the buttons at the lower edge of a phone half cover is measured as too small.
        self.page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        assert_accessible(self.page)

    def assert_fits(self) -> None:
        """Asserts that the page does not scroll sideways."""
        widths = self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths[0] == widths[1]


@dataclass
class LiveServer:
    """``posttrain serve`` in a process of its own; ``store`` and ``queue`` are of the same workspace."""

    root: Path
    store: Workspace
    queue: Queue
    browser: Browser
    address: str = ""
    process: Any = None
    contexts: list[BrowserContext] = field(default_factory=list)
    cookies: dict[str, Any] = field(default_factory=dict)

    def start(self, port: int = 0) -> None:
        self.process, self.address = forked.start_server(self.root, self.root.with_suffix(".server.log"), port)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def visit(self, name: str, width: int = 1200, scheme: Any = "light", language: str = "en") -> Visit:
        """Opens the first page in a browser of its own; signs the account in, unless its last session still counts."""
        context = self.browser.new_context(
            base_url=self.address,
            viewport={"width": width, "height": 800},
            color_scheme=scheme,
            locale={"en": "en-GB", "zh": "zh-CN"}[language],
            reduced_motion="reduce",
        )
        context.set_default_timeout(30_000)
        self.contexts.append(context)
        page = context.new_page()
        visit = Visit(page)
        page.on("console", lambda message: visit.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: visit.errors.append(str(error)))
        context.add_cookies(self.cookies.get(name, []))
        if context.request.get("/api/session").ok:
            page.goto("/")
            return visit
        page.goto("/sign-in")
        page.fill("#name", name)
        page.fill("#password", PASSWORD)
        page.press("#password", "Enter")
        page.wait_for_url(f"{self.address}/")
        self.cookies[name] = context.cookies()
        return visit

    def sign_out(self) -> None:
        """Closes the browsers of all visits."""
        while self.contexts:
            self.contexts.pop().close()


def _serve(root: Path, browser: Browser, *, team: bool = True) -> Iterator[LiveServer]:
    with Workspace.create(root) as store:
        if team:
            add_team(store)
        server = LiveServer(root, store, Queue(store.metadata, QueueConfig(check=0.0)), browser)
        server.start()
        yield server
        server.sign_out()
        server.kill()


@pytest.fixture(scope="module")
def _served_team(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[LiveServer]:
    yield from _serve(tmp_path_factory.mktemp("live") / "workspace", browser)


@pytest.fixture
def live(_served_team: LiveServer) -> Iterator[LiveServer]:
    """The server of a workspace with a team; each test of a module adds batches of its own.

    Pages close after each test: one that is left open asks for items of every batch, and takes those of later tests.
    """
    yield _served_team
    _served_team.sign_out()


@pytest.fixture
def lone(tmp_path: Path, browser: Browser) -> Iterator[LiveServer]:
    """As `live`, of one test alone."""
    yield from _serve(tmp_path / "workspace", browser)


@pytest.fixture(scope="module")
def _served_loop(
    finished_workspace: Path, tmp_path_factory: pytest.TempPathFactory, browser: Browser
) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("loop") / "workspace"
    shutil.copytree(finished_workspace, root, symlinks=True)
    with Workspace.open(root) as store:
        add_team(store)
        add_answers(store, 120)
    yield from _serve(root, browser, team=False)


@pytest.fixture
def live_loop(_served_loop: LiveServer) -> Iterator[LiveServer]:
    """The server of a workspace after two rounds, whose team has answered a batch.

    The tests of a module share it: each leaves the champion, and the accounts that others use, as they were.
    """
    yield _served_loop
    _served_loop.sign_out()


@pytest.fixture
def live_new(small: Any, browser: Browser) -> Iterator[LiveServer]:
    """The server of a small workspace in which nothing has run."""
    yield from _serve(small(), browser)
