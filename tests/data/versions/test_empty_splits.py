"""An empty split raises an error that names the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.store.errors import UserError

TEXTS = ["apple", "river", "stone", "cloud", "tiger", "piano", "lemon", "skate"]


def build_version(folder: Path, groups: list[str | None], texts: list[str] = TEXTS, **splits: Any) -> Version:
    rows = [
        {"prompt": text, "completion": "a", "group": group, "at": f"2026-01-{day:02}"}
        for day, (text, group) in enumerate(zip(texts, groups, strict=True), 1)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    splits = {"by": "time", "time": "at", "test": 0.25, **splits}
    return build({"name": "set", "files": ["a.jsonl"], "splits": splits, "workspace": folder, "engine": "inline"})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["anna"] * 8, "2 records were dropped because they are linked to an earlier split, of the group anna;"),
        (["anna", "ben"] * 4, "2 records were dropped .* split, of 2 groups, anna, ben;"),
    ],
)
def test_groups_across_the_boundary_are_named(tmp_path: Path, groups: list[str | None], message: str) -> None:
    with pytest.raises(UserError, match=f"^data.splits.test: `test` is empty: {message} .* `data.splits.since`"):
        build_version(tmp_path, groups)
    assert build_version(tmp_path, groups, group=False).count("test") == 2


def test_near_duplicates_across_the_boundary_are_named_by_position(tmp_path: Path) -> None:
    texts = [*TEXTS[:6], *TEXTS[:2]]
    with pytest.raises(UserError, match=r"2 records that would be in it are linked to .* first at a\.jsonl:7;"):
        build_version(tmp_path, [None] * 8, texts)


def test_a_group_before_the_boundary_drops_no_record(tmp_path: Path) -> None:
    assert build_version(tmp_path, ["anna"] * 6 + [None] * 2).count("test") == 2


def test_too_few_records_for_a_share_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`test` is empty; there are 8 records and a share of 0\.25"):
        build_version(tmp_path, [None] * 8, since={"test": "2027-01-01"})
