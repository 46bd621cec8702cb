"""The lines of a training's metrics file, and a real browser."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright
from sample_report import sample_lines


@pytest.fixture(scope="session")
def training_lines() -> Callable[..., list[dict[str, Any]]]:
    """``training_lines(steps, seed=..., groups=..., metrics=...)``: the lines of a training's metrics file."""
    return sample_lines


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    # The headless shell is Chromium without its windows, and takes half of its time.
    programs = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, programs)), None)
    assert executable, "these tests need Chromium: apt-get install chromium"
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=flags)
        yield browser
        browser.close()
