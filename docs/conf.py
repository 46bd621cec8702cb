"""Builds the documents as pages with a search, readable without a server: ``make docs`` writes them to ``site/``.

Sphinx reads the Markdown files where they are. What is generated from the code is added here, as the pages are read.
"""

import shutil
from pathlib import Path
from typing import Any

import posttrain
from posttrain.cli.config import config_keys
from posttrain.loop.config import Config

project, author, version = "posttrain", "The posttrain maintainers", posttrain.__version__
project_copyright = "The posttrain maintainers, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/results/*.md", "examples/*/*.md"]
exclude_patterns = [".*", "**/.*", "site", "src", "tests", "demo"]

html_theme = "furo"
html_title = f"posttrain {version}"
html_copy_source = False
html_show_search_summary = False  # a browser may not read other pages of a folder

myst_heading_anchors = 6  # of the links that GitHub makes
# Diagrams of Mermaid are shown as their text: drawing them takes a script from elsewhere.
suppress_warnings = ["misc.highlighting_failure"]
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"


def add_generated(app: Any, name: str, source: list[str]) -> None:
    """Adds the table of contents, every key of the config, and the docstrings of the public names."""
    if name == "README":
        source[0] += _contents()
    elif name == "docs/configuration":
        source[0] += _keys()
    elif name == "docs/api":
        source[0] += _names()


def _contents() -> str:
    pages = {
        "Use it": ["quickstart", "configuration", "data", "select", "labelling", "training", "tuning", "merging"],
        "Run it": ["ensembles", "watching", "server", "recovery"],
        "Build on it": ["api", "extending", "from_trl", "decisions"],
    }
    trees = [(title, [f"docs/{page}" for page in names]) for title, names in pages.items()]
    results = sorted(Path(path).stem for path in Path(__file__).parents[1].glob("benchmarks/results/*.md"))
    trees += [
        ("The project", ["ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "docs/README", "中文 <README.zh-CN>"]),
        ("Measured", ["BENCHMARKS", "examples/banking77/README", *(f"benchmarks/results/{name}" for name in results)]),
    ]
    return "".join(
        f"\n```{{toctree}}\n:caption: {title}\n:hidden:\n:titlesonly:\n\n" + "\n".join(names) + "\n```\n"
        for title, names in trees
    )


def _keys() -> str:
    rows = []
    for entry in config_keys(Config):
        default = "required" if entry.default is None else f"`{entry.default}`"
        meaning = entry.meaning.replace("|", r"\|").replace("<", r"\<")
        rows.append(f"| `{entry.key}` | {default} | {meaning} |")
    return "\n".join(["", "## Every key", "", "| key | default | meaning |", "| --- | --- | --- |", *rows, ""])


def _names() -> str:
    names = sorted(name for name in posttrain.__all__ if not name.startswith("_"))
    kinds = {name: "class" if isinstance(getattr(posttrain, name), type) else "function" for name in names}
    parts = [f".. auto{kind}:: posttrain.{name}\n" for name, kind in kinds.items()]
    return "\n## Docstrings\n\n```{eval-rst}\n" + "\n".join(parts) + "```\n"


def copy_first_page(app: Any, error: Exception | None) -> None:
    """Writes the first page under the name that web servers look for."""
    if error is None:
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_generated)
    app.connect("build-finished", copy_first_page)
