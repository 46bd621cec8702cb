"""Checks a page with axe-core."""

from pathlib import Path

from playwright.sync_api import Page

_AXE = Path(__file__).parent / "axe" / "axe.min.js"

_OPTIONS = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    # Of what passes, axe would describe each node, in megabytes.
    "resultTypes": ["violations"],
}


def assert_accessible(page: Page) -> None:
    """Asserts that axe-core finds nothing, serious or not, in the rules of WCAG 2.2 AA and of good practice."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_AXE.read_text("utf-8"))
    violations = page.evaluate("options => axe.run(document, options).then(result => result.violations)", _OPTIONS)
    problems = [
        f"{rule['impact']} {rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in violations
        for node in rule["nodes"]
    ]
    assert problems == [], (page.url, problems)
