"""A record keeps its split, however the set grows and the recipe changes."""

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import Version, build
from posttrain.data.records.record import input_id
from posttrain.data.split.assignment import hash_draw
from posttrain.data.versions.leaks import find_leaks

SPLITS = {"test": 0.3, "near_duplicates": 0.8}
WORDS = [f"{a}{b}{c}" for a in ("ba", "do", "ki", "lu") for b in ("ra", "ti", "so", "pe") for c in ("n", "m", "l", "k")]

Row = dict[str, Any]
SplitByKey = dict[str, str]


@pytest.fixture(autouse=True, scope="module")
def no_fsync() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def write(path: Path, rows: Sequence[Row], mode: str = "w") -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def split_of_rows(version: Version) -> list[tuple[Row, str]]:
    """Every record with its split."""
    tables = version.tables_with_splits()
    return [pair for table, splits in tables for pair in zip(table.to_pylist(), splits, strict=True)]


def split_by_key(version: Version, key: str = "id") -> SplitByKey:
    return {row[key]: split for row, split in split_of_rows(version)}


def split_by_text(version: Version) -> SplitByKey:
    return {row["prompt"][-1]["content"]: split for row, split in split_of_rows(version)}


def splits_by_line(version: Version) -> list[tuple[int, str]]:
    return sorted((row["line"], split) for row, split in split_of_rows(version) if row["source"] == "a.jsonl")


def leaks(version: Version, **settings: Any) -> list[str]:
    tables = {split: version.records(split) for split in version.splits}
    return [str(leak) for leak in find_leaks(tables, 0.8, None, **settings)]


def drifting_texts(generator: random.Random, chains: int, length: int) -> list[str]:
    """Chains of texts: neighbours are near duplicates, the first and the last of a chain are not."""
    result = []
    for _ in range(chains):
        text_words = generator.choices(WORDS, k=25)
        for _ in range(length):
            text_words[generator.randrange(25)] = generator.choice(WORDS)
            result.append(" ".join(text_words))
    generator.shuffle(result)
    return result


LENGTH = {"length": {"input": {"min_words": 1}}}
RECIPES: list[list[Any]] = [
    ["exact"],
    ["exact", "minhash"],
    ["exact", "conflicts", {"minhash": {"threshold": 0.9}}],
    [{"length": {"input": {"min_words": 2}}}, "exact"],
    ["exact", "conflicts", "decontaminate"],
]


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    first_steps=st.sampled_from(RECIPES[:2]),
    events=st.lists(st.sampled_from(["file", "line", "recipe", "both"]), min_size=3, max_size=3),
)
def test_no_record_ever_moves(seed: int, first_steps: list[Any], events: list[str]) -> None:
    generator = random.Random(seed)
    steps = first_steps
    records = [
        {"prompt": text, "completion": generator.choice("xy"), "group": generator.choice([None, None, "g", "h", "i"])}
        for text in drifting_texts(generator, 8, 8)
    ]
    with TemporaryDirectory() as folder:
        root = Path(folder)
        base = {"name": "set", "labels": ["x", "y"], "workspace": root, "engine": "inline"}
        base["splits"] = {**SPLITS, "seed": seed, "group": bool(seed % 2)}
        unrelated_rows = [{"prompt": " ".join(generator.choices(WORDS, k=9)), "completion": "x"} for _ in range(30)]
        write(root / "a.jsonl", [*records[:32], *unrelated_rows])
        version = build({**base, "files": ["a.jsonl"], "steps": steps})
        old_splits, old_input_splits = split_by_key(version), split_by_key(version, "input_id")
        for position, event in enumerate(events):
            new_rows = records[32 + 10 * position : 42 + 10 * position]
            new_rows += [{**generator.choice(records[:32]), "completion": "y"} for _ in range(2)]
            files = [f"{position}.jsonl"] if event in ("file", "both") else ["a.jsonl"]
            write(root / files[0], new_rows, "w" if event in ("file", "both") else "a")
            steps = generator.choice(RECIPES) if event in ("recipe", "both") else steps
            grown = build({**base, "files": files, "steps": steps})
            splits, input_splits = split_by_key(grown), split_by_key(grown, "input_id")
            assert {id for id in splits if old_splits.get(id, splits[id]) != splits[id]} == set()
            assert {
                id for id in input_splits if old_input_splits.get(id, input_splits[id]) != input_splits[id]
            } == set()
            assert leaks(grown, group=bool(seed % 2)) == []
            old_splits, old_input_splits = {**splits, **old_splits}, {**input_splits, **old_input_splits}


def prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Bridge:
    """Two records in two splits, and one that is like both: ``train``, ``test`` and ``between``.

    Attributes:
        seed: the seed that puts ``train`` and ``test`` into their splits.
    """

    def __init__(self) -> None:
        generator = random.Random(1)
        base_words, other_words = (
            generator.sample(WORDS, 40),
            [word.upper()[::-1] for word in generator.sample(WORDS, 6)],
        )
        self.train, self.between, self.test = (" ".join([*other_words[:n], *base_words[n:]]) for n in (0, 3, 6))
        ids = [input_id(prompt(text), None) for text in (self.train, self.test)]
        self.seed = next(seed for seed in range(999) if (hash_draw(ids, None, seed) < 0.3).tolist() == [False, True])
        self.others = [" ".join(generator.choices(WORDS, k=12)) for _ in range(40)]

    def rows(self, *prompts: str, **values: Any) -> list[Row]:
        return [{"prompt": text, "completion": "x", **values} for text in prompts]


@pytest.fixture(scope="module")
def bridge() -> Bridge:
    return Bridge()


Make = Callable[..., Version]


def maker(root: Path, bridge: Bridge) -> Make:
    def version(rows: Sequence[Row], file: str, mode: str = "w", **values: Any) -> Version:
        write(root / file, rows, mode)
        config = {"name": "set", "files": [file], "workspace": root, "engine": "inline", "steps": ["exact"]}
        splits = {**SPLITS, "seed": bridge.seed, **values.pop("splits", {})}
        return build({**config, "splits": splits, **values})

    return version


@pytest.fixture
def make(tmp_path: Path, bridge: Bridge) -> Make:
    """``make(rows, file, ...)``: the next version of the set, grown by a file of these rows."""
    return maker(tmp_path, bridge)


def make_small(make: Make, bridge: Bridge) -> Version:
    return make(bridge.rows(bridge.train, *bridge.others[:20], bridge.test), "a.jsonl", labels=["x", "y"])


@pytest.fixture(scope="module")
def small_workspace(tmp_path_factory: pytest.TempPathFactory, bridge: Bridge) -> Path:
    root = tmp_path_factory.mktemp("small")
    make_small(maker(root, bridge), bridge)
    return root


@pytest.fixture
def small(small_workspace: Path, tmp_path: Path, make: Make, bridge: Bridge) -> Version:
    shutil.copytree(small_workspace, tmp_path, symlinks=True, dirs_exist_ok=True)
    version = make_small(make, bridge)  # finds itself finished
    assert [split_by_text(version)[text] for text in (bridge.train, bridge.test)] == ["train", "test"]
    return version


def check_unmoved(old: Version, new: Version) -> SplitByKey:
    """The splits of the texts of a grown version, none of which has moved."""
    old_splits, new_splits = split_by_text(old), split_by_text(new)
    assert {text for text in new_splits if old_splits.get(text, new_splits[text]) != new_splits[text]} == set()
    assert leaks(new) == []
    return new_splits


def rejection_reason(version: Version, text: str) -> str:
    """The step and the reason that rejected the record."""
    rows = [row for table in version.rejected() for row in table.to_pylist()]
    return next(f"{row['step']}: {row['reason']}" for row in rows if row["prompt"][-1]["content"] == text)


def test_a_conflict_removes_an_old_record(make: Make, bridge: Bridge, small: Version) -> None:
    contradiction = {"prompt": bridge.others[3], "completion": "y"}
    rows = [*bridge.rows(bridge.between, *bridge.others[20:]), contradiction]
    grown = make(rows, "b.jsonl", labels=["x", "y"], steps=["exact", "conflicts"])
    splits = check_unmoved(small, grown)
    assert bridge.others[3] not in splits
    assert rejection_reason(grown, bridge.between) == "split: links two splits"
    restored = make(bridge.rows(bridge.others[3]), "c.jsonl", labels=["x", "y"], splits={"seed": 99})
    assert check_unmoved(small, restored)[bridge.others[3]] == split_by_text(small)[bridge.others[3]], (
        "a restored record returns to its split"
    )


def test_near_duplicates_remove_an_old_record(make: Make, bridge: Bridge, small: Version) -> None:
    grown = make(bridge.rows(bridge.between), "b.jsonl", labels=["x", "y"], steps=["exact", "minhash"])
    assert bridge.test not in check_unmoved(small, grown)
    check_unmoved(small, make(bridge.rows("something else"), "c.jsonl", labels=["x", "y"], steps=["exact"]))


@pytest.mark.parametrize("steps", [[LENGTH, "exact"], []])
def test_records_stay_under_another_recipe(make: Make, bridge: Bridge, small: Version, steps: list[Any]) -> None:
    grown = make(bridge.rows(bridge.between, *bridge.others[20:]), "b.jsonl", steps=steps)
    check_unmoved(small, grown)
    assert rejection_reason(grown, bridge.between) == "split: links two splits"


@pytest.mark.parametrize("splits", [{"seed": 99}, {"test": 0.8}, {"validation": 0.2}, {"near_duplicates": 0.7}])
def test_records_stay_under_other_split_settings(
    make: Make, bridge: Bridge, small: Version, splits: dict[str, Any]
) -> None:
    new_splits = check_unmoved(small, make(bridge.rows(*bridge.others[20:]), "b.jsonl", splits=splits))
    assert set(new_splits) >= {bridge.test, *bridge.others[20:]}


def test_records_stay_if_lines_are_appended_or_reordered(
    make: Make, bridge: Bridge, small: Version, tmp_path: Path
) -> None:
    grown = make(bridge.rows(bridge.between), "a.jsonl", "a")
    check_unmoved(small, grown)
    assert rejection_reason(grown, bridge.between) == "split: links two splits"
    path = tmp_path / "a.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([lines[-1], *lines[1:-1], lines[0]]), encoding="utf-8")
    reordered = make([], "a.jsonl", "a")
    check_unmoved(small, reordered)
    assert rejection_reason(reordered, bridge.between) == "split: links two splits", "although it is the first line now"


def test_a_record_with_a_changed_answer_keeps_its_split(make: Make, bridge: Bridge, small: Version) -> None:
    grown = make(bridge.rows(bridge.between, bridge.test, bridge.train, completion="y"), "a.jsonl")
    assert check_unmoved(small, grown) == {bridge.test: "test", bridge.train: "train"}


def test_a_record_whose_group_links_two_splits_is_rejected(make: Make, bridge: Bridge) -> None:
    first_text, second_text = bridge.others[:2]
    rows = [
        *bridge.rows(bridge.train, group="g"),
        *bridge.rows(bridge.test, group="h"),
        *bridge.rows(*bridge.others[:9]),
    ]
    seed = next(seed for seed in range(99) if (hash_draw(["", ""], ["g", "h"], seed) < 0.3).tolist() == [False, True])
    version = make(rows, "a.jsonl", splits={"seed": seed})
    linking_rows = [
        {"prompt": bridge.test, "completion": "y", "group": "g"},
        {"prompt": f"{first_text} {second_text}", "group": "g"},
    ]
    grown = make([{"completion": "x", **row} for row in linking_rows], "b.jsonl", splits={"seed": seed})
    assert check_unmoved(version, grown)[f"{first_text} {second_text}"] == "train"
    rejections = [row for table in grown.rejected() for row in table.to_pylist()]
    assert [(row["completion"], row["reason"]) for row in rejections] == [("y", "links two splits")]


def test_old_records_linked_by_a_setting_are_rejected(make: Make, bridge: Bridge) -> None:
    rows = [*bridge.rows(bridge.train, bridge.test, group="g"), *bridge.rows(*bridge.others)]
    version = make(rows, "a.jsonl", splits={"group": False})
    grouped = make(bridge.rows("more"), "b.jsonl")
    assert bridge.train not in check_unmoved(version, grouped)
    assert rejection_reason(grouped, bridge.train) == "split: links two splits"
    near = make(bridge.rows("yet more"), "c.jsonl", splits={"group": False, "near_duplicates": 0.5})
    assert check_unmoved(version, near)[bridge.test] == "test"
    assert rejection_reason(near, bridge.train) == "split: links two splits"


def test_records_stay_if_a_rewriting_step_is_added_and_removed(make: Make, bridge: Bridge) -> None:
    plain_texts = [f"write to someone{n}@example.com about {text}" for n, text in enumerate(bridge.others[:20])]
    steps = [{"pii": {}}, "exact"]
    version = make(bridge.rows(*plain_texts), "a.jsonl")
    masked = make(bridge.rows("nothing"), "b.jsonl", steps=steps)
    assert not set(split_by_text(version)) & set(split_by_text(masked)) - {"nothing"}
    assert splits_by_line(masked) == splits_by_line(version)
    unmasked = make(bridge.rows("something"), "c.jsonl", splits={"seed": 99})
    assert check_unmoved(version, unmasked).keys() > set(plain_texts)


def test_a_version_built_at_once_is_not_reused_for_a_grown_one(
    make: Make, bridge: Bridge, small: Version, tmp_path: Path
) -> None:
    write(tmp_path / "b.jsonl", bridge.rows(bridge.between))
    at_once = make([], "b.jsonl", "a", labels=["x", "y"], name="whole", files=["a.jsonl", "b.jsonl"])
    assert {split_by_text(at_once)[text] for text in (bridge.train, bridge.test)} == {"train"}
    grown = make([], "b.jsonl", "a", labels=["x", "y"])
    check_unmoved(small, grown)
    assert grown.id != at_once.id
    assert make([], "b.jsonl", "a", labels=["x", "y"]).id == grown.id, "its own files again"
    assert make([], "a.jsonl", "a", labels=["x", "y"]).id == grown.id


def test_without_a_bridge_a_grown_version_equals_one_built_at_once(make: Make, bridge: Bridge, small: Version) -> None:
    grown = make(bridge.rows(*bridge.others[20:]), "b.jsonl", labels=["x", "y"])
    at_once = make([], "b.jsonl", "a", labels=["x", "y"], name="whole", files=["a.jsonl", "b.jsonl"])
    assert grown.id == at_once.id


def test_splits_survive_a_version_without_splits(make: Make, bridge: Bridge, small: Version) -> None:
    unsplit = build({"name": "set", "steps": ["exact"], "workspace": small.folder.parents[2], "engine": "inline"})
    assert unsplit.splits == ["train"]
    check_unmoved(small, make(bridge.rows(bridge.between), "b.jsonl"))
