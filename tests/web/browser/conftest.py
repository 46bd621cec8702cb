"""The real server of a workspace, and people who are signed in, in a real browser."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page
from sample_batches import PASSWORD, add_team

from posttrain.label.queue import Queue
from posttrain.store.workspace import Workspace

AXE = Path(__file__).parents[1] / "axe" / "axe.min.js"


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
        """Asserts that axe-core finds nothing that is serious or critical, nor any other breach of WCAG 2.2 AA."""
        self.page.evaluate(AXE.read_text("utf-8"))
        options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
        result = self.page.evaluate("options => axe.run(document, options)", options)
        problems = [
            f"{rule['impact']} {rule['id']}: {node['target']} {node['failureSummary']}"
            for rule in result["violations"]
            for node in rule["nodes"]
        ]
        assert problems == []

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

    def start(self, port: int = 0) -> None:
        command = [sys.executable, "-m", "posttrain", "serve", "-w", str(self.root), "--port", str(port)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        line = self.process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match, line
        self.address = match[0]
        # A full pipe would stop the server.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def visit(self, name: str, width: int = 1200, scheme: Any = "light", language: str = "en") -> Visit:
        """Signs an account in, in a browser of its own."""
        context = self.browser.new_context(
            base_url=self.address,
            viewport={"width": width, "height": 800},
            color_scheme=scheme,
            locale={"en": "en-GB", "zh": "zh-CN"}[language],
            reduced_motion="reduce",
        )
        context.set_default_timeout(15_000)
        self.contexts.append(context)
        page = context.new_page()
        visit = Visit(page)
        page.on("console", lambda message: visit.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: visit.errors.append(str(error)))
        page.goto("/sign-in")
        page.fill("#name", name)
        page.fill("#password", PASSWORD)
        page.press("#password", "Enter")
        page.wait_for_url(f"{self.address}/")
        return visit


@pytest.fixture
def live(tmp_path: Path, browser: Browser) -> Iterator[LiveServer]:
    """The server of an empty folder with a team, none of whose batches are there yet."""
    root = tmp_path / "workspace"
    with Workspace.create(root) as store:
        add_team(store)
        server = LiveServer(root, store, Queue(store.metadata), browser)
        server.start()
        yield server
        for context in server.contexts:
            context.close()
        server.kill()
    shutil.rmtree(root, ignore_errors=True)


