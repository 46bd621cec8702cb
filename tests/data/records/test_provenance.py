"""Variants and synthetic records join the split of their origin, and never an evaluation split."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.records.provenance import (
    RECORD_KINDS,
    origin_events,
    origin_ids,
    record_kinds,
    without_held_out_variants,
)
from posttrain.data.records.record import CHANGED, concat
from posttrain.data.split import FrozenSplits, assign_splits, hash_split, split_keys
from posttrain.data.split.split_step import freeze_settings
from posttrain.data.versions.leaks import find_leaks
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of

HALVES = FrozenSplits(validation=0.25, test=0.25)
ORIGINALS = table_of(*({"prompt": f"original {n}", "completion": "xy"[n % 2]} for n in range(40)))
IDS = ORIGINALS["id"].to_pylist()


def variant(of: str) -> str:
    return json.dumps({"augmented": {"method": "typos", "of": of}})


def synthetic(*seeds: str) -> str:
    return json.dumps({"synthetic": {"method": "paraphrases", "model": "m", "seeds": list(seeds)}})


def records_of(*metas: str) -> pa.Table:
    return table_of(*({"prompt": f"made {n}", "completion": "x", "meta": meta} for n, meta in enumerate(metas)))


def test_origin_ids() -> None:
    metas = [
        "{}",
        variant("a"),
        synthetic("b"),
        synthetic("c", "d"),
        json.dumps({**json.loads(synthetic("b")), **json.loads(variant("e"))}),
        '{"synthetic": true, "augmented": 2}',
        '{"said": "augmented"}',
        '{"said": {"augmented": {"of": "x"}}}',
    ]
    assert origin_ids(records_of(*metas)).to_pylist() == [None, "a", "b", "", "e", None, None, None]
    assert origin_ids(records_of()).to_pylist() == []


def test_origin_events() -> None:
    (event,) = origin_events(synthetic("c", "d"))
    assert (event["step"], event["what"]) == ("synthesize", "paraphrases by m, from c, d")
    assert (event["model"], event["seeds"]) == ("m", ["c", "d"])
    meta = json.dumps({**json.loads(synthetic("b")), **json.loads(variant("e"))})
    assert [event["what"] for event in origin_events(meta)] == ["paraphrases by m, from b", "typos, a variant of e"]
    for own in (None, "{}", '{"synthetic": true, "augmented": 2}', '{"said": {"augmented": {"of": "x"}}}'):
        assert origin_events(own) == []


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    origins=st.lists(st.integers(0, 39), max_size=30),
    new_first=st.booleans(),
    group=st.booleans(),
    stratify=st.sampled_from([None, "label"]),
)
def test_derived_records_join_the_split_of_their_origin_and_are_never_held_out(
    origins: list[int], new_first: bool, group: bool, stratify: str | None
) -> None:
    config = HALVES.model_copy(update={"group": group, "stratify": stratify})
    new = records_of(*(variant(IDS[n]) if n % 3 else synthetic(IDS[n]) for n in origins))
    table = split_keys(concat([new, ORIGINALS] if new_first else [ORIGINALS, new]), config)
    config = freeze_settings(table, config)
    original_splits = assign_splits(split_keys(ORIGINALS, config), config).splits
    splits, rejections = assign_splits(table, config)
    new_splits, splits_of_originals = (
        (splits[: len(origins)], splits[len(origins) :]) if new_first else (splits[40:], splits[:40])
    )
    if new_first:
        assert (new_splits == 0).all()
        assert (splits_of_originals[sorted(set(origins))] == 0).all()
        other_rows = np.setdiff1d(np.arange(40), origins)
        assert (splits_of_originals[other_rows] == original_splits[other_rows]).all()
    else:
        assert (splits_of_originals == original_splits).all()
        assert new_splits.tolist() == [0 if original_splits[n] == 0 else -1 for n in origins]
        for row, rejection in rejections.items():
            split = "test" if original_splits[origins[row - 40]] == 2 else "validation"
            assert rejection.detail == f"was derived from others and is linked to `{split}` (f:{origins[row - 40] + 1})"


def test_frozen_shares_ignore_derived_records() -> None:
    config = FrozenSplits(test=0.25, stratify="label")
    table = concat([ORIGINALS, records_of(*(synthetic() for _ in range(200)))])
    assert freeze_settings(split_keys(table, config), config) == freeze_settings(split_keys(ORIGINALS, config), config)
    derived = split_keys(records_of(synthetic("a"), variant("b")), config)
    with pytest.raises(UserError, match=r"^data\.splits: every record was derived from others"):
        freeze_settings(derived, config)
    without_test = FrozenSplits(test=0)
    assert assign_splits(derived, freeze_settings(derived, without_test)).splits.tolist() == [0, 0]


def test_the_time_of_derived_records_is_ignored() -> None:
    config = FrozenSplits(by="time", time="at", since={"test": "2026-01-05"})
    originals = table_of(*({"text": f"text {day}", "meta": f'{{"at": "2026-01-0{day}"}}'} for day in (1, 6)))
    early, late = originals["id"].to_pylist()
    splits = assign_splits(
        split_keys(concat([originals, records_of(variant(early), variant(late), synthetic())]), config), config
    ).splits
    assert splits.tolist() == [0, 2, 0, -1, 0]


def test_a_hash_split_holds_out_only_originals() -> None:
    table = concat([ORIGINALS, records_of(*map(variant, IDS))])
    training_rows, held_out = hash_split(table, 0.5)
    assert origin_ids(held_out).null_count == held_out.num_rows > 5
    outcome = without_held_out_variants(training_rows, held_out, CHANGED.empty_table())
    assert sorted(outcome.rejected["kept"].to_pylist()) == sorted(held_out["id"].to_pylist())
    assert not set(origin_ids(outcome.kept).to_pylist()) & set(held_out["id"].to_pylist())
    assert outcome.kept.num_rows + outcome.rejected.num_rows == training_rows.num_rows


def test_variants_of_a_rewritten_test_record_are_rejected() -> None:
    training_rows = records_of(
        variant("as it was read"), variant("between two steps"), variant("its twin"), variant("of another")
    )
    changes = pa.Table.from_pylist(
        [
            {"id": "between two steps", "before": "as it was read", "step": "normalise", "detail": ""},
            {"id": ORIGINALS["id"][0].as_py(), "before": "between two steps", "step": "pii", "detail": ""},
            {"id": ORIGINALS["id"][0].as_py(), "before": "its twin", "step": "pii", "detail": ""},
        ],
        CHANGED,
    )
    outcome = without_held_out_variants(training_rows, ORIGINALS.slice(0, 1), changes)
    assert outcome.kept.num_rows == 1
    assert set(outcome.rejected["kept"].to_pylist()) == {ORIGINALS["id"][0].as_py()}


@pytest.mark.parametrize("mark", [variant, synthetic])
def test_the_leak_check_finds_a_record_whose_origin_is_held_out(mark: object) -> None:
    derived, origin = records_of(mark(IDS[3])), ORIGINALS.slice(3, 1)  # type: ignore[operator]
    for tables in ({"train": derived, "test": origin}, {"train": origin, "test": derived}):
        (leak,) = find_leaks(tables)
        assert (leak.reason, leak.splits) == ("origin", ("train", "test"))
        assert leak.detail == "has an origin in common with"
    assert find_leaks({"train": derived, "test": ORIGINALS.slice(4, 2)}) == []
    (leak,) = find_leaks({"train": records_of("{}", mark("q")).slice(1), "test": records_of(mark("q"))})  # type: ignore[operator]
    assert leak.reason == "origin"


def test_record_kinds() -> None:
    labelled = {"labelled_by": {"annotator": "people", "round": 1, "seconds": None}}
    feedback = {"feedback": {"id": "f1", "rating": 5}}
    expected = [
        ({}, "files"),
        ({"topic": "labelled_by"}, "files"),
        ({"synthetic": "a column of the user's", "feedback": "of theirs, too", "pseudo": 1}, "files"),
        (labelled, "labelled"),
        (feedback, "user_feedback"),
        (feedback | {"labelled_by": "feedback"}, "user_feedback"),
        (feedback | labelled, "labelled"),
        (json.loads(synthetic("a", "b")) | labelled, "synthetic"),
        (json.loads(variant("a")), "synthetic"),
        (labelled | {"hard_negative": {"of": "a"}}, "hard_negatives"),
        ({"pseudo": {"teacher": "linear"}} | labelled, "pseudo_labels"),
    ]
    metas = pa.chunked_array([[json.dumps(meta)] for meta, _ in expected] + [pa.array([None], pa.string())])
    assert record_kinds(metas) == [kind for _, kind in expected] + ["files"]
    assert {kind for _, kind in expected} == set(RECORD_KINDS)
