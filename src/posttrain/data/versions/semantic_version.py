"""Semantic version names of datasets (https://semver.org), where what changed says which number rises, and tags."""

import re
from typing import Literal

from posttrain.store.errors import UserError

Bump = Literal["major", "minor", "patch"]
_FORM = re.compile(r"v?(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})")
_TAG = re.compile(r"(?!v\d)[A-Za-z][A-Za-z0-9_.-]{0,99}")


def check_tag(text: str) -> None:
    """Refuse a word that cannot stand behind the ``@`` of a version's name, or could be taken for a version.

    Raises:
        UserError: it is such a word.
    """
    if not _TAG.fullmatch(text):
        fix = "a letter, then letters, digits, `_`, `-` and `.`, and no version such as v1 or 1.0.0"
        raise UserError(f"`{text}` is no tag", fix=fix)


def parse_version(text: str) -> tuple[int, int, int]:
    """Major, minor and patch of ``2.3.1`` or ``v2.3.1``.

    Raises:
        UserError: it is no such version.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise UserError(f"`{text}` is no semantic version", where="--version", fix="such as 2.3.1")
    major, minor, patch = map(int, found.groups())
    return major, minor, patch


def next_version(last: str | None, bump: Bump) -> str:
    """The version after ``last``: ``1.0.0`` when there is none."""
    if last is None:
        return "1.0.0"
    major, minor, patch = parse_version(last)
    match bump:
        case "major":
            return f"{major + 1}.0.0"
        case "minor":
            return f"{major}.{minor + 1}.0"
        case "patch":
            return f"{major}.{minor}.{patch + 1}"
