"""Derived records in whole versions: none is held out, and none has a held-out origin."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data import Version, build
from posttrain.data.augment import rewording
from posttrain.data.reading.reader import read
from posttrain.data.records.provenance import origin_ids
from posttrain.data.records.record import Turn, concat
from posttrain.data.synthesis.config import SynthesisConfig
from posttrain.data.synthesis.synthesize import synthesize
from posttrain.data.versions.export import export_file

WORDS = [f"{a}{b}{c}" for a in ("ba", "do", "ki", "lu") for b in ("ra", "ti", "so", "pe") for c in ("n", "m", "l", "k")]
METHODS: list[dict[str, Any]] = [
    {"method": "typos"},
    {"method": "templates", "templates": ["Listen, please: {text}"]},
    {"method": "paraphrase", "endpoint": {"base_url": "http://127.0.0.1:9/v1", "model": "none"}},
]
STEPS: list[Any] = ["exact", {"minhash": {"threshold": 0.8}}]
SPLITS = {"test": 0.4}


def reword(prompts: Sequence[Sequence[Turn]]) -> list[str | None]:
    """Replies of other words, sampled with the prompt as the seed."""
    replies: list[str | None] = []
    for prompt in prompts:
        generator = random.Random(prompt[-1]["content"])
        replies.append(json.dumps([" ".join(generator.sample(WORDS, 12)) for _ in range(2)]))
    return replies


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewording, "_cached_endpoint", lambda config, folder: reword)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    generator = random.Random(0)
    rows = [{"prompt": " ".join(generator.sample(WORDS, 12)), "completion": f"{n % 4}"} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def version_of(root: Path, name: str, file: str, steps: list[Any], **splits: Any) -> Version:
    config = {"name": name, "files": [file], "workspace": root, "engine": "inline"}
    return build({**config, "steps": steps, "splits": {**SPLITS, **splits}})


def check_derived(version: Version) -> pa.Table:
    """Returns the derived records of a version; all must be training records whose origin is not held out."""
    test, train = version.records("test"), version.records("train")
    assert test.num_rows
    assert origin_ids(test).null_count == test.num_rows
    derived = train.filter(origin_ids(train).is_valid())
    held_out = set(test["id"].to_pylist())
    assert not held_out & set(origin_ids(derived).to_pylist())
    assert not held_out & set(derived["group"].to_pylist())
    return derived


def test_variants_of_every_method_and_their_export(root: Path) -> None:
    version = version_of(root, "varied", "a.jsonl", [*STEPS, {"augment": {"methods": METHODS}}])
    derived = check_derived(version)
    methods = [json.loads(meta)["augmented"]["method"] for meta in derived["meta"].to_pylist()]
    train = version.records("train")
    funnel = [(entry["reason"], entry["count"]) for entry in version.meta["funnel"]]
    assert ("added", -len(methods)) in funnel
    assert funnel[0] == ("in", 40)
    assert sum(count for _, count in funnel[1:]) == 40
    originals = train.filter(origin_ids(train).is_null())
    assert {method: methods.count(method) for method in methods} == dict.fromkeys(
        ("typos", "templates", "paraphrase"), originals.num_rows
    )
    assert set(origin_ids(derived).to_pylist()) == set(originals["id"].to_pylist())
    files = {"first.jsonl": [derived, originals, version.records("test")], "last.jsonl": [originals, derived]}
    for file, tables in files.items():
        export_file(concat(tables), root / file)
        reimported = version_of(root, file.removesuffix(".jsonl"), file, ["exact"], seed=3)
        train = reimported.records("train")
        reimported_variants = check_derived(reimported)
        assert set(origin_ids(reimported_variants).to_pylist()) <= set(train["id"].to_pylist())
        assert (
            reimported_variants.num_rows == len(methods)
            if file == "first.jsonl"
            else 0 < reimported_variants.num_rows < len(methods)
        )


def test_paraphrases_of_held_out_records_are_rejected(root: Path) -> None:
    earlier = version_of(root, "set", "a.jsonl", STEPS)
    seeds = next(read(root / "a.jsonl"))
    config = SynthesisConfig(method="paraphrases", records=80, per_request=2)
    derived = synthesize(seeds, config, reword, root / "work").records
    assert set(origin_ids(derived).to_pylist()) == set(seeds["id"].to_pylist())
    export_file(derived, root / "made.jsonl")
    later = version_of(root, "set", "made.jsonl", STEPS)
    assert later.records("test").equals(earlier.records("test"))
    held_out = set(earlier.records("test")["id"].to_pylist())
    kept_records = check_derived(later)
    assert kept_records.num_rows == sum(origin not in held_out for origin in origin_ids(derived).to_pylist())
    rejections = concat(list(later.rejected()), next(iter(later.rejected())).schema)
    rejected_records = rejections.filter(origin_ids(rejections).is_valid())
    assert set(rejected_records["reason"].to_pylist()) == {"links two splits"}
    assert kept_records.num_rows + rejected_records.num_rows == derived.num_rows


@pytest.mark.slow
def test_paraphrases_follow_a_seed_that_a_step_rewrites(root: Path) -> None:
    rows = [json.loads(line) for line in (root / "a.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [{**row, "prompt": f"{row['prompt']} ann{n}@example.com"} for n, row in enumerate(rows)]
    (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    seeds = next(read(root / "a.jsonl"))
    config = SynthesisConfig(method="paraphrases", records=80, per_request=2)
    derived = synthesize(seeds, config, reword, root / "work").records
    export_file(derived, root / "made.jsonl")
    steps = [{"pii": {"action": "mask"}}, *STEPS]
    files = ["a.jsonl", "made.jsonl"]
    at_once = build(
        {"name": "whole", "files": files, "workspace": root, "engine": "inline", "steps": steps, "splits": SPLITS}
    )
    version_of(root, "grown", files[0], steps)
    for version in (at_once, version_of(root, "grown", files[1], steps)):
        lines = version.records("test")["line"].to_pylist()
        held_out = set(seeds.take(pa.array([line - 1 for line in lines]))["id"].to_pylist())
        kept_records = check_derived(version)
        assert kept_records.num_rows
        assert not held_out & set(origin_ids(kept_records).to_pylist())
