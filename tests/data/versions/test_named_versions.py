"""Dataset versions in place of files in the config."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.data.config import DataConfig
from posttrain.data.sets.pool_and_test import LoopData, build_pool_and_test, input_digests
from posttrain.data.versions.named_versions import resolve_versions
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.stages.collect import RoundData, collect
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

pytestmark = pytest.mark.slow

LABELS = ["payment", "returns", "shipping"]
STEPS: list[Any] = ["normalise", "pii", "exact", "conflicts", {"minhash": {"threshold": 0.9}}, "decontaminate"]
SPLITS = {"test": 0.3, "seed": 1}
ITEMS = ["coat", "shoe", "lamp", "desk", "chair", "phone", "watch", "kettle", "bike", "tent"]
ITEMS += ["rug", "mug", "pan", "sock", "hat", "ring", "belt", "scarf", "book", "toy"]
QUESTIONS = {
    "shipping": "Where is the {} of anna@example.org?",
    "returns": "Take my {} back?",
    "payment": "Paid {} twice.",
}


def write(path: Path, items: list[str]) -> None:
    rows = [
        {"prompt": question.format(item), "completion": label}
        for item in items
        for label, question in QUESTIONS.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def config(**values: Any) -> DataConfig:
    return DataConfig.read({"steps": STEPS, **values}, "posttrain.yaml")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace.create(tmp_path) as workspace:
        yield workspace


@pytest.fixture
def support(store: Workspace) -> Version:
    return add(store)


def add(store: Workspace, name: str = "support", items: list[str] = ITEMS[:16], **values: Any) -> Version:
    write(store.root / f"{name}.jsonl", items)
    settings = {"name": name, "files": [f"{name}.jsonl"], "labels": LABELS, "steps": STEPS, "splits": SPLITS}
    return build({**settings, "engine": "inline", **values}, store)


def build_sets(store: Workspace, data: DataConfig) -> LoopData:
    return build_pool_and_test(data, store.root, LABELS, resolve_versions(data.files, store.root, store))


def test_each_set_takes_its_split_and_is_not_cleaned_again(store: Workspace, support: Version) -> None:
    sets = build_sets(store, config(labelled="support@v1.0.0", test="support@v1.0.0"))
    assert sets.labelled.equals(support.records("train").combine_chunks())
    assert sets.test.equals(support.records("test").combine_chunks())
    assert support.count("test")
    assert not any(table.num_rows for table in sets.rejected.values())
    pool = build_sets(store, config(pool="support", test="support")).pool
    assert pool["input_id"].to_pylist() == support.records("train")["input_id"].to_pylist()
    assert pool["completion"].null_count == pool.num_rows


def test_versions_and_files_can_be_combined(store: Workspace, support: Version) -> None:
    write(store.root / "more.jsonl", ITEMS[14:])
    sets = build_sets(store, config(labelled=["support@v1", "more.jsonl"], test="support"))
    file_records = [source for source in sets.labelled["source"].to_pylist() if source == "more.jsonl"]
    assert len(file_records) == 12, "those of the version, and those that leak a test record, are dropped"
    assert sets.labelled.num_rows == support.count("train") + len(file_records)


@pytest.mark.parametrize("name", ["support", "support@v1", "support@v1.0.0", "support@production", "ID"])
def test_every_name_of_a_version(store: Workspace, name: str) -> None:
    version = add(store, tags=["production"])
    name = version.id if name == "ID" else name
    data = config(labelled=name, test=0.2)
    versions = resolve_versions(data.files, store.root, store)
    assert input_digests(data, store.root, versions) == {name: version.id}


def test_the_digest_of_a_name_follows_the_latest_version(store: Workspace, support: Version) -> None:
    data = config(labelled=["support", "support@v1"])

    def digests() -> dict[str, str]:
        return input_digests(data, store.root, resolve_versions(data.files, store.root, store))

    old_digests = digests()
    add(store, items=ITEMS)
    new_digests = digests()
    assert old_digests["support"] == old_digests["support@v1"] == new_digests["support@v1"] == support.id
    assert new_digests["support"] != support.id


def test_a_file_takes_precedence_over_a_version_of_its_name(store: Workspace, support: Version) -> None:
    write(store.root / "support", ITEMS[:1])
    assert resolve_versions(["support", "support@v1"], store.root, store).keys() == {"support@v1"}


@pytest.mark.parametrize("name", ["suport", "support@v7", "support@nightly", "pool"])
def test_an_unknown_name_raises(store: Workspace, support: Version, name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name}: there is no such file, and no such dataset version; .*data list"):
        resolve_versions([name], store.root, store)
    with pytest.raises(UserError, match="no such dataset version"):
        resolve_versions([name], store.root, None)


def test_a_version_without_splits_can_be_the_test_set(store: Workspace) -> None:
    without_splits = add(store, "whole", splits=None)
    support = add(store)
    assert build_sets(store, config(labelled="support", test="whole")).test.num_rows == without_splits.count("train")
    assert support.count("train")
    with pytest.raises(UserError, match=r"^whole@v1: models train on all its records"):
        build_sets(store, config(labelled="whole", test="whole@v1"))


def test_an_answer_outside_the_labels_raises_with_its_position(store: Workspace, support: Version) -> None:
    data = config(labelled="support@v1", test=0.2)
    versions = resolve_versions(data.files, store.root, store)
    with pytest.raises(UserError, match=r"^support\.jsonl:\d+: label `\w+` is not in the label set"):
        build_pool_and_test(data, store.root, ["payment"], versions)


def test_variants_are_not_augmented_again(store: Workspace) -> None:
    augment = {"augment": {"methods": [{"method": "typos"}]}}
    steps = [*STEPS, augment]
    version = add(store, steps=steps)
    write(store.root / "more.jsonl", ITEMS[18:])
    version_only = build_sets(store, config(labelled="support", test="support", steps=steps))
    assert version_only.labelled.equals(version.records("train").combine_chunks())
    with_file = build_sets(store, config(labelled=["support", "more.jsonl"], test="support", steps=steps)).labelled
    metas = [meta for meta, source in zip(*(with_file[c].to_pylist() for c in ("meta", "source")), strict=True)]
    assert sum("augmented" in meta for meta in metas) > sum(
        "augmented" in meta for meta in version.records("train")["meta"].to_pylist()
    )


def test_a_version_can_be_a_suite(store: Workspace, support: Version) -> None:
    other_version = add(store, "other", items=ITEMS, suites=[{"file": "support@v1"}], splits=None)
    held_out = set(support.records("test")["input_id"].to_pylist())
    assert held_out
    assert not held_out & set(other_version.records()["input_id"].to_pylist())
    assert other_version.meta["suites"] == {"support@v1": support.id}


def test_a_round_uses_the_latest_version_of_a_name(store: Workspace, support: Version) -> None:
    values = {"model": "tiny", "task": {"labels": LABELS}, "label": {"annotator": "people"}}
    data = {"pool": "support", "test": "support@v1", "steps": STEPS}
    config = Config.read({**values, "data": data}, "posttrain.yaml")

    def collect_data() -> RoundData:
        return collect(RoundContext(store, config, 0, in_round=False))

    first = collect_data()
    assert collect_data() == first
    add(store, items=ITEMS)
    second = collect_data()
    assert second.pool.id != first.pool.id
    assert second.test.id == first.test.id
    assert second.pool.meta["counts"]["records"] > first.pool.meta["counts"]["records"]
