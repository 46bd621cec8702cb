"""A record that has a side keeps it, however the set grows and whatever becomes of its recipe."""

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import Version, build
from posttrain.data.records.identity import input_id
from posttrain.data.split.assignment import hash_draw
from posttrain.data.versions.leaks import find_leaks

SPLITS = {"test": 0.3, "near_duplicates": 0.8}
WORDS = [f"{a}{b}{c}" for a in ("ba", "do", "ki", "lu") for b in ("ra", "ti", "so", "pe") for c in ("n", "m", "l", "k")]

Row = dict[str, Any]
Sides = dict[str, str]


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def write(path: Path, rows: Sequence[Row], mode: str = "w") -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def split_of_rows(version: Version) -> list[tuple[Row, str]]:
    """Every record with its split."""
    tables = version.sided_tables()
    return [pair for table, names in tables for pair in zip(table.to_pylist(), names, strict=True)]


def sides(version: Version, key: str = "id") -> Sides:
    return {row[key]: side for row, side in split_of_rows(version)}


def texts(version: Version) -> Sides:
    return {row["prompt"][-1]["content"]: side for row, side in split_of_rows(version)}


def by_line(version: Version) -> list[tuple[int, str]]:
    return sorted((row["line"], side) for row, side in split_of_rows(version) if row["source"] == "a.jsonl")


def leaks(version: Version, **settings: Any) -> list[str]:
    tables = {split: version.records(split) for split in version.splits}
    return [str(leak) for leak in find_leaks(tables, 0.8, None, **settings)]


def drifting(generator: random.Random, chains: int, length: int) -> list[str]:
    """Texts of which each is like the one before in its chain, and the first and the last are not alike."""
    result = []
    for _ in range(chains):
        words = generator.choices(WORDS, k=25)
        for _ in range(length):
            words[generator.randrange(25)] = generator.choice(WORDS)
            result.append(" ".join(words))
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
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    first=st.sampled_from(RECIPES[:2]),
    events=st.lists(st.sampled_from(["file", "line", "recipe", "both"]), min_size=3, max_size=3),
)
def test_no_record_ever_moves(seed: int, first: list[Any], events: list[str]) -> None:
    generator = random.Random(seed)
    steps = first
    records = [
        {"prompt": text, "completion": generator.choice("xy"), "group": generator.choice([None, None, "g", "h", "i"])}
        for text in drifting(generator, 8, 8)
    ]
    with TemporaryDirectory() as folder:
        root = Path(folder)
        base = {"name": "set", "labels": ["x", "y"], "workspace": root, "engine": "inline"}
        base["splits"] = {**SPLITS, "seed": seed, "group": bool(seed % 2)}
        apart = [{"prompt": " ".join(generator.choices(WORDS, k=9)), "completion": "x"} for _ in range(30)]
        write(root / "a.jsonl", [*records[:32], *apart])
        before = build({**base, "files": ["a.jsonl"], "steps": steps})
        history, inputs = sides(before), sides(before, "input_id")
        for position, event in enumerate(events):
            subset = records[32 + 10 * position : 42 + 10 * position]
            subset += [{**generator.choice(records[:32]), "completion": "y"} for _ in range(2)]
            files = [f"{position}.jsonl"] if event in ("file", "both") else ["a.jsonl"]
            write(root / files[0], subset, "w" if event in ("file", "both") else "a")
            steps = generator.choice(RECIPES) if event in ("recipe", "both") else steps
            after = build({**base, "files": files, "steps": steps})
            now, now_inputs = sides(after), sides(after, "input_id")
            assert {id for id in now if history.get(id, now[id]) != now[id]} == set()
            assert {id for id in now_inputs if inputs.get(id, now_inputs[id]) != now_inputs[id]} == set()
            assert leaks(after, group=bool(seed % 2)) == []
            history, inputs = {**now, **history}, {**now_inputs, **inputs}


def prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Bridge:
    """Two records on two sides, and one that is like both: ``train``, ``test`` and ``between``.

    Attributes:
        seed: with which the draws put them there.
    """

    def __init__(self) -> None:
        generator = random.Random(1)
        words, other = (generator.sample(WORDS, 40), [word.upper()[::-1] for word in generator.sample(WORDS, 6)])
        self.train, self.between, self.test = (" ".join([*other[:n], *words[n:]]) for n in (0, 3, 6))
        ids = [input_id(prompt(text), None) for text in (self.train, self.test)]
        self.seed = next(seed for seed in range(999) if (hash_draw(ids, None, seed) < 0.3).tolist() == [False, True])
        self.others = [" ".join(generator.choices(WORDS, k=12)) for _ in range(40)]

    def rows(self, *texts: str, **values: Any) -> list[Row]:
        return [{"prompt": text, "completion": "x", **values} for text in texts]


@pytest.fixture(scope="module")
def bridge() -> Bridge:
    return Bridge()


Make = Callable[..., Version]


@pytest.fixture
def make(tmp_path: Path, bridge: Bridge) -> Make:
    """``make(rows, file, ...)``: the version that has grown by a file of these rows, each of its texts with a side."""

    def version(rows: Sequence[Row], file: str, mode: str = "w", **values: Any) -> Version:
        write(tmp_path / file, rows, mode)
        config = {"name": "set", "files": [file], "workspace": tmp_path, "engine": "inline", "steps": ["exact"]}
        splits = {**SPLITS, "seed": bridge.seed, **values.pop("splits", {})}
        return build({**config, "splits": splits, **values})

    return version


@pytest.fixture
def small(make: Make, bridge: Bridge) -> Version:
    version = make(bridge.rows(bridge.train, *bridge.others[:20], bridge.test), "a.jsonl", labels=["x", "y"])
    assert [texts(version)[text] for text in (bridge.train, bridge.test)] == ["train", "test"]
    return version


def stays(before: Version, after: Version) -> Sides:
    """Sides of the texts of a version that has grown, none of which has moved."""
    then, now = texts(before), texts(after)
    assert {text for text in now if then.get(text, now[text]) != now[text]} == set()
    assert leaks(after) == []
    return now


def rejected(version: Version, text: str) -> str:
    """The reason for which the record went."""
    rows = [row for table in version.rejected() for row in table.to_pylist()]
    return next(f"{row['step']}: {row['reason']}" for row in rows if row["prompt"][-1]["content"] == text)


def test_a_conflict_takes_an_old_record_out(make: Make, bridge: Bridge, small: Version) -> None:
    disputed = {"prompt": bridge.others[3], "completion": "y"}
    rows = [*bridge.rows(bridge.between, *bridge.others[20:]), disputed]
    after = make(rows, "b.jsonl", labels=["x", "y"], steps=["exact", "conflicts"])
    now = stays(small, after)
    assert bridge.others[3] not in now
    assert rejected(after, bridge.between) == "split: links two splits"
    again = make(bridge.rows(bridge.others[3]), "c.jsonl", labels=["x", "y"], splits={"seed": 99})
    assert stays(small, again)[bridge.others[3]] == texts(small)[bridge.others[3]], (
        "what was gone comes back where it was"
    )


def test_near_duplicates_take_an_old_record_out(make: Make, bridge: Bridge, small: Version) -> None:
    after = make(bridge.rows(bridge.between), "b.jsonl", labels=["x", "y"], steps=["exact", "minhash"])
    assert bridge.test not in stays(small, after)
    stays(small, make(bridge.rows("something else"), "c.jsonl", labels=["x", "y"], steps=["exact"]))


@pytest.mark.parametrize("steps", [["exact", LENGTH], [LENGTH, "exact"], []])
def test_another_recipe(make: Make, bridge: Bridge, small: Version, steps: list[Any]) -> None:
    after = make(bridge.rows(bridge.between, *bridge.others[20:]), "b.jsonl", steps=steps)
    stays(small, after)
    assert rejected(after, bridge.between) == "split: links two splits"


@pytest.mark.parametrize("splits", [{"seed": 99}, {"test": 0.8}, {"validation": 0.2}, {"near_duplicates": 0.7}])
def test_other_splits(make: Make, bridge: Bridge, small: Version, splits: dict[str, Any]) -> None:
    now = stays(small, make(bridge.rows(*bridge.others[20:]), "b.jsonl", splits=splits))
    assert set(now) >= {bridge.test, *bridge.others[20:]}


def test_lines_appended_and_files_put_in_front(make: Make, bridge: Bridge, small: Version, tmp_path: Path) -> None:
    after = make(bridge.rows(bridge.between), "a.jsonl", "a")
    stays(small, after)
    assert rejected(after, bridge.between) == "split: links two splits"
    reordered = tmp_path / "a.jsonl"
    lines = reordered.read_text(encoding="utf-8").splitlines(keepends=True)
    reordered.write_text("".join([lines[-1], *lines[1:-1], lines[0]]), encoding="utf-8")
    again = make([], "a.jsonl", "a")
    stays(small, again)
    assert rejected(again, bridge.between) == "split: links two splits", "though it is the first now"


def test_a_record_whose_answer_has_changed(make: Make, bridge: Bridge, small: Version) -> None:
    after = make(bridge.rows(bridge.between, bridge.test, bridge.train, completion="y"), "a.jsonl")
    assert stays(small, after) == {bridge.test: "test", bridge.train: "train"}


def test_a_group_that_joins_two_splits(make: Make, bridge: Bridge) -> None:
    first, other = bridge.others[:2]
    rows = [
        *bridge.rows(bridge.train, group="g"),
        *bridge.rows(bridge.test, group="h"),
        *bridge.rows(*bridge.others[:9]),
    ]
    seed = next(seed for seed in range(99) if (hash_draw(["", ""], ["g", "h"], seed) < 0.3).tolist() == [False, True])
    before = make(rows, "a.jsonl", splits={"seed": seed})
    joining = [{"prompt": bridge.test, "completion": "y", "group": "g"}, {"prompt": f"{first} {other}", "group": "g"}]
    after = make([{"completion": "x", **row} for row in joining], "b.jsonl", splits={"seed": seed})
    assert stays(before, after)[f"{first} {other}"] == "train"
    rejections = [row for table in after.rejected() for row in table.to_pylist()]
    assert [(row["completion"], row["reason"]) for row in rejections] == [("y", "links two splits")]


def test_old_records_that_a_setting_joins(make: Make, bridge: Bridge) -> None:
    rows = [*bridge.rows(bridge.train, bridge.test, group="g"), *bridge.rows(*bridge.others)]
    before = make(rows, "a.jsonl", splits={"group": False})
    after = make(bridge.rows("more"), "b.jsonl")
    assert bridge.train not in stays(before, after)
    assert rejected(after, bridge.train) == "split: links two splits"
    alike = make(bridge.rows("yet more"), "c.jsonl", splits={"group": False, "near_duplicates": 0.5})
    assert stays(before, alike)[bridge.test] == "test"
    assert rejected(alike, bridge.train) == "split: links two splits"


def test_a_step_that_rewrites_is_added_and_taken_away(make: Make, bridge: Bridge) -> None:
    plain = [f"write to someone{n}@example.com about {text}" for n, text in enumerate(bridge.others[:20])]
    masked = [{"pii": {}}, "exact"]
    before = make(bridge.rows(*plain), "a.jsonl")
    after = make(bridge.rows("nothing"), "b.jsonl", steps=masked)
    assert not set(texts(before)) & set(texts(after)) - {"nothing"}
    assert by_line(after) == by_line(before)
    again = make(bridge.rows("something"), "c.jsonl", splits={"seed": 99})
    assert stays(before, again).keys() > set(plain)


def test_one_built_at_once_is_not_taken_for_one_that_grew(
    make: Make, bridge: Bridge, small: Version, tmp_path: Path
) -> None:
    write(tmp_path / "b.jsonl", bridge.rows(bridge.between))
    at_once = make([], "b.jsonl", "a", labels=["x", "y"], name="whole", files=["a.jsonl", "b.jsonl"])
    assert {texts(at_once)[text] for text in (bridge.train, bridge.test)} == {"train"}
    grown = make([], "b.jsonl", "a", labels=["x", "y"])
    stays(small, grown)
    assert grown.id != at_once.id
    assert make([], "b.jsonl", "a", labels=["x", "y"]).id == grown.id, "its own files again"
    assert make([], "a.jsonl", "a", labels=["x", "y"]).id == grown.id


def test_what_bridges_nothing_is_the_same_grown_and_at_once(make: Make, bridge: Bridge, small: Version) -> None:
    grown = make(bridge.rows(*bridge.others[20:]), "b.jsonl", labels=["x", "y"])
    at_once = make([], "b.jsonl", "a", labels=["x", "y"], name="whole", files=["a.jsonl", "b.jsonl"])
    assert grown.id == at_once.id


def test_sides_outlive_a_version_without_splits(make: Make, bridge: Bridge, small: Version) -> None:
    without = build({"name": "set", "steps": ["exact"], "workspace": small.folder.parents[2], "engine": "inline"})
    assert without.splits == ["train"]
    stays(small, make(bridge.rows(bridge.between), "b.jsonl"))
