"""Builds the quality and drift report of Banking77 with the user's commands, and takes pictures of it.

    python benchmarks/banking77_report.py --data DIR [--out page.html] [--pictures DIR]

``DIR`` holds ``banking77_train.csv`` and ``banking77_test.csv`` with the columns text and category. The first version
is the test file, in which labels are equally frequent; the second is the training file alone, in which they are not.
The report must find a drift of labels, and none of lengths or languages. Pictures need Debian's chromium and
playwright.
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
"""The first and last section of each picture, and its maximum height in pixels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("banking77.html"))
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for file in FILES:
            shutil.copy(options.data / file, root)
        with (root / FILES[1]).open(encoding="utf-8", newline="") as csv_file:
            labels = sorted({row["category"] for row in csv.DictReader(csv_file)})
        columns = {"prompt": "text", "completion": "category"}
        config = {"model": "tiny", "task": {"labels": labels}, "data": {"columns": columns, "steps": STEPS}}
        (root / "posttrain.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        for file in FILES:
            run(root, "data", "add", file, "--name", "banking77", "--engine", "inline", "--fresh")
        run(root, "data", "report", "banking77", "report.html", "--since", "banking77@v1.0.0")
        shutil.copy(root / "report.html", options.out)
    if options.pictures is not None:
        take_pictures(options.out, options.pictures)


def run(root: Path, *arguments: str) -> None:
    """Run a posttrain command in the workspace ``root``."""
    subprocess.run([sys.executable, "-m", "posttrain", *arguments], cwd=root, check=True)


def take_pictures(page: Path, folder: Path) -> None:
    """Take pictures of the page's sections, in the light colour scheme, 1280 pixels wide."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce")
        view.goto(page.absolute().as_uri())
        # The charts are drawn after the page is loaded, and are taller then.
        view.locator("#drift .plot svg").last.wait_for()
        for name, (first, last, max_height) in PICTURES.items():
            top, bottom = view.locator(f"#{first}").bounding_box(), view.locator(f"#{last}").bounding_box()
            assert top is not None
            assert bottom is not None
            height = min(bottom["y"] + bottom["height"] + 32 - top["y"], max_height)
            clip = {"x": 0, "y": top["y"] - 16, "width": 1280, "height": height}
            view.screenshot(path=folder / name, full_page=True, clip=clip)
        browser.close()


if __name__ == "__main__":
    main()
