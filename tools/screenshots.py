"""Takes pictures of the server's pages for the documents: ``python tools/screenshots.py [WORKSPACE] [NAME ...]``.

Runs the demo of the tiny model in WORKSPACE, or in a temporary folder, unless it is there; adds a team whose answers
are simulated; serves it; and visits each page of `PAGES` in light, in dark and on a phone with Chromium. Writes
``docs/screenshots/NAME-VIEW.png``.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "web"), str(ROOT / "tests" / "label")]

VIEWS = {"light": (1180, 820, "light"), "dark": (1180, 820, "dark"), "phone": (390, 844, "light")}
LONGEST = 1500
"""Pixels of a picture's height; a longer page is cut."""
PATIENCE_MS = 120_000
COLOURS = 128
"""Colours of a picture: pages have few, and a palette makes the file a third."""


def wait_for_charts(page: Page) -> None:
    """Waits until the charts in view are drawn."""
    page.wait_for_timeout(900)


def open_promotion(page: Page) -> None:
    """Asks to promote a model."""
    page.get_by_role("button", name="Promote").first.click()


def wait_for_item(page: Page) -> None:
    """Waits until an item and the progress are shown."""
    page.wait_for_selector("#work:not([hidden])")
    if page.locator("#progress").count():
        page.wait_for_selector("#progress progress")


def mark_parts(page: Page) -> None:
    """Marks a name and a city in the text, as a person does by keys."""
    wait_for_item(page)
    page.focus(".markable")
    for key in ("ArrowRight", "ArrowRight", "Shift+ArrowRight", "1", *["ArrowRight"] * 5, "2", "Shift+ArrowLeft"):
        page.keyboard.press(key)


def take_answer(page: Page) -> None:
    """Takes the second annotator's answer, and does not decide yet."""
    wait_for_item(page)
    page.keyboard.press("2")


PAGES: dict[str, tuple[str, str, Callable[[Page], object] | None]] = {
    "dashboard": ("olga", "/dashboard", None),
    "rounds": ("olga", "/rounds", None),
    "runs": ("olga", "/runs?{runs}", None),
    "records": ("olga", "/records", None),
    "lineage": ("olga", "/lineage", None),
    "models": ("olga", "/models", None),
    "promote": ("olga", "/models", open_promotion),
    "label": ("anna", "/label?batch=round-4", wait_for_item),
    "label-spans": ("anna", "/label?batch=spans", mark_parts),
    "label-preference": ("anna", "/label?batch=preference", wait_for_item),
    "review": ("rosa", "/review?batch=round-3", take_answer),
    "guidelines": ("rosa", "/guidelines", None),
    "quality": ("rosa", "/quality", lambda page: page.wait_for_selector("#agreement", timeout=120_000)),
    "people": ("olga", "/people", None),
    "audit": ("olga", "/people/audit", None),
    "account": ("anna", "/account", None),
}
"""Account, path, and what is done before the picture, by the picture's name."""


def build_workspace(root: Path) -> str:
    """Builds the workspace; returns the query that names its trainings."""
    from sample_batches import add_batches, add_team
    from sample_team import add_answers

    from posttrain.demo.workspace import prepare_workspace
    from posttrain.label.accounts import Accounts
    from posttrain.store.workspace import Workspace

    prepare_workspace(root, quick=True, data=None)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "posttrain", "run", "-w", str(root)], check=True, env=environment)
    with Workspace.open(root) as store:
        if not Accounts(store.metadata).all():
            add_team(store)
            add_answers(store, 400)
            add_batches(store)
        return "&".join(f"run={run.id}" for run in store.metadata.runs(stage="train"))


def serve(root: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts the server; returns its process and its address."""
    command = [sys.executable, "-m", "posttrain", "serve", "-w", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    match = re.search(r"http://\S+", process.stdout.readline())
    assert match, "the server did not start"
    return process, match[0]


def sign_in(browser: Browser, address: str, account: str) -> Any:
    """Signs an account in; returns the browser's state."""
    from sample_batches import PASSWORD

    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{address}/sign-in")
    page.fill("#name", account)
    page.fill("#password", PASSWORD)
    page.press("#password", "Enter")
    page.wait_for_url(f"{address}/")
    state = context.storage_state()
    context.close()
    return state


def take(browser: Browser, address: str, name: str, state: Any, folder: Path, runs: str) -> None:
    """Takes the pictures of a page."""
    _, path, prepare = PAGES[name]
    for view, (width, height, scheme) in VIEWS.items():
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            reduced_motion="reduce",
            locale="en-GB",
            storage_state=state,
        )
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(address + path.format(runs=runs))
        if prepare is not None:
            prepare(page)
        wait_for_charts(page)
        tall = page.evaluate("document.documentElement.scrollHeight")
        page.set_viewport_size({"width": width, "height": min(max(tall, height), LONGEST)})
        page.wait_for_timeout(300)
        file = folder / f"{name}-{view}.png"
        page.screenshot(path=file)
        shrink(file)
        print(f"{file.name}: {file.stat().st_size // 1000} kB")
        context.close()


def shrink(file: Path) -> None:
    """Reduces a picture to a palette."""
    from PIL import Image

    with Image.open(file) as picture:
        reduced = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    reduced.save(file, optimize=True)


def main(names: list[str]) -> None:
    """Takes the pictures of the pages named, or of all."""
    workspace = Path(names.pop(0)) if names and names[0] not in PAGES else None
    if unknown := set(names) - PAGES.keys():
        raise SystemExit(f"no page {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
    programs = ("chromium", "chromium-headless-shell", "google-chrome")
    executable = next(filter(None, map(shutil.which, programs)), None)
    assert executable, "this needs Chromium: apt-get install chromium"
    folder = ROOT / "docs" / "screenshots"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        root = workspace or Path(temporary) / "support-messages"
        runs = build_workspace(root)
        server, address = serve(root)
        try:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
            states: dict[str, Any] = {}
            for name in names or PAGES:
                account = PAGES[name][0]
                if account not in states:
                    states[account] = sign_in(browser, address, account)
                take(browser, address, name, states[account], folder, runs)
            browser.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
