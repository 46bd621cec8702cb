"""Both READMEs have the same content, and local links of the documents exist."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import posttrain
from posttrain.cli.config import config_keys
from posttrain.loop.config import Config

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
OTHER_LANGUAGE = {"README.md", "README.zh-CN.md"}


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _headings(text: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)]


def _code(text: str) -> list[tuple[str, list[str]]]:
    """Code blocks without their comments, which are translated."""
    return [
        (kind, [re.sub(r"\s*# .*", "", line) for line in block.splitlines()]) for kind, block in FENCE.findall(text)
    ]


def _links(text: str) -> list[str]:
    return [link for link in LINK.findall(text) if link not in OTHER_LANGUAGE]


def _inline_code(text: str) -> list[str]:
    return sorted(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))


def _rows(text: str) -> int:
    return sum(line.startswith("|") for line in text.splitlines())


def _items(text: str) -> int:
    return sum(line.startswith("- ") for line in text.splitlines())


@pytest.mark.parametrize("extract", [_headings, _code, _links, _inline_code, _rows, _items])
def test_both_languages_have_the_same_parts(extract) -> None:
    english, chinese = extract(_read("README.md")), extract(_read("README.zh-CN.md"))
    assert english
    assert english == chinese


def test_both_languages_link_to_each_other() -> None:
    assert "README.zh-CN.md" in LINK.findall(_read("README.md"))
    assert "README.md" in LINK.findall(_read("README.zh-CN.md"))


def test_the_readme_opens_with_the_two_commands_and_the_picture() -> None:
    kind, commands = _code(_read("README.md"))[0]
    assert (kind, commands) == ("sh", ["make demo", "make test"])
    opening, _, rest = _read("README.md").partition("## ")
    assert "docs/learning-curve.svg" in opening
    assert _code(opening)[1][1][-1].startswith("posttrain demo --data FILE")
    (page,) = re.findall(r"\(docs/screenshots/(.*?\.png)\)", opening)
    assert (ROOT / "docs" / "screenshots" / page).stat().st_size < 200_000
    assert rest


def _anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub and the site give to the headings."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        anchors.add(next(name for name in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if name not in anchors))
    return anchors


@pytest.mark.parametrize("document", DOCUMENTS)
def test_local_links_exist(document: str) -> None:
    folder = (ROOT / document).parent
    for link in LINK.findall(FENCE.sub("", _read(document))):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = folder / name if name else ROOT / document
        # The site shows files only.
        assert target.is_file(), f"{document} links to {link}"
        assert not anchor or anchor in _anchors(target.read_text(encoding="utf-8")), f"{document} links to {link}"


def test_the_site_has_every_document_and_every_key() -> None:
    spec = importlib.util.spec_from_file_location("docs_conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    pages = {}
    for page in ("README", "docs/configuration", "docs/api"):
        source = [""]
        site.add_generated(None, page, source)
        pages[page] = source[0]
    listed = re.findall(r"^(?:[^:`]\S* <)?([\w./-]+)>?$", pages["README"], re.MULTILINE)
    assert sorted(["README", *listed]) == sorted(name.removesuffix(".md") for name in DOCUMENTS)
    for entry in config_keys(Config):
        assert f"\n| `{entry.key}` | " in pages["docs/configuration"]
    assert all(f":: posttrain.{name}\n" in pages["docs/api"] for name in posttrain.__all__)
    # `make docs` installs what the constraints pin.
    pinned = {line.partition("==")[0] for line in _read("constraints.txt").splitlines()}
    assert {"furo", "myst-parser", "sphinx"} <= pinned
    workflow = yaml.safe_load(_read(".github/workflows/docs.yml"))
    runs = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    assert runs == ["make docs"]
    assert "\ndocs: " in _read("Makefile")
