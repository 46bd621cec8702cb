"""The quality and drift report of Banking77, made by the commands that a user would give, and pictures of it.

    python benchmarks/banking77_report.py --data DIR [--out page.html] [--pictures DIR]

The folder holds ``banking77_train.csv`` and ``banking77_test.csv`` with the columns text and category. The first
version is the test file, in which labels are equally frequent, the second the training file alone, in which they are
not: of labels a drift is to be found, of lengths and languages none. Pictures need Debian's chromium, and playwright.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = ("banking77_test.csv", "banking77_train.csv")
STEPS = [
    "normalise",
    "pii",
    "language",
    {"length": {"input": {"max_characters": 400}}},
    "exact",
    "conflicts",
    "minhash",
]
PICTURES = {"data-report.png": ("funnel", "labels", 2000), "drift-report.png": ("drift", "drift", 1300)}
"""By name the first and the last section that a picture shows, and how high it is at most, in pixels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("banking77.html"))
    parser.add_argument("--pictures", type=Path, help="folder that the pictures go to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for file in FILES:
            shutil.copy(options.data / file, root)
        with (root / FILES[1]).open(encoding="utf-8", newline="") as rows:
            labels = sorted({row["category"] for row in csv.DictReader(rows)})
        columns = {"prompt": "text", "completion": "category"}
        config = {"model": "tiny", "task": {"labels": labels}, "data": {"columns": columns, "steps": STEPS}}
        (root / "posttrain.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        for file in FILES:
            run(root, "data", "add", file, "--name", "banking77", "--engine", "inline", "--fresh")
        run(root, "data", "report", "banking77", "report.html", "--since", "banking77@v1.0.0")
        shutil.copy(root / "report.html", options.out)
    if options.pictures is not None:
        take(options.out, options.pictures)


def run(root: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "posttrain", *arguments], cwd=root, check=True)


def take(page: Path, folder: Path) -> None:
    """Pictures of sections of a page, in the light colours, 1280 pixels wide."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        view.goto(page.absolute().as_uri())
        for name, (first, last, highest) in PICTURES.items():
            above, below = view.locator(f"#{first}").bounding_box(), view.locator(f"#{last}").bounding_box()
            assert above is not None
            assert below is not None
            height = min(below["y"] + below["height"] + 32 - above["y"], highest)
            clip = {"x": 0, "y": above["y"] - 16, "width": 1280, "height": height}
            view.screenshot(path=folder / name, full_page=True, clip=clip)
        browser.close()


if __name__ == "__main__":
    main()
