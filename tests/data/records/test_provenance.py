"""Variants and synthetic records go where their origin is, and never where models are measured."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.records.provenance import origin_events, origin_ids, without_held_out_variants
from posttrain.data.records.schema import CHANGED, concat
from posttrain.data.split import SplitsConfig, assign_splits, hash_split, split_keys
from posttrain.data.split.split_step import freeze_settings
from posttrain.data.versions.leaks import find_leaks
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of

HALVES = SplitsConfig(validation=0.25, test=0.25)
ORIGINALS = table_of(*({"prompt": f"original {n}", "completion": "xy"[n % 2]} for n in range(40)))
IDS = ORIGINALS["id"].to_pylist()


def variant(of: str) -> str:
    return json.dumps({"augmented": {"method": "typos", "of": of}})


def synthetic(*seeds: str) -> str:
    return json.dumps({"synthetic": {"method": "paraphrases", "model": "m", "seeds": list(seeds)}})


def records_of(*metas: str) -> pa.Table:
    return table_of(*({"prompt": f"made {n}", "completion": "x", "meta": meta} for n, meta in enumerate(metas)))


def test_marks_are_read() -> None:
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


def test_marks_are_told() -> None:
    (event,) = origin_events(synthetic("c", "d"))
    assert (event["step"], event["what"]) == ("synthesize", "paraphrases by m, from c, d")
    assert (event["model"], event["seeds"]) == ("m", ["c", "d"])
    both = json.dumps({**json.loads(synthetic("b")), **json.loads(variant("e"))})
    assert [event["what"] for event in origin_events(both)] == ["paraphrases by m, from b", "typos, a variant of e"]
    for own in (None, "{}", '{"synthetic": true, "augmented": 2}', '{"said": {"augmented": {"of": "x"}}}'):
        assert origin_events(own) == []


@settings(max_examples=80, deadline=None)
@given(
    of=st.lists(st.integers(0, 39), max_size=30),
    first=st.booleans(),
    grouped=st.booleans(),
    stratify=st.sampled_from([None, "label"]),
)
def test_they_are_on_their_origins_side_and_never_held_out(
    of: list[int], first: bool, grouped: bool, stratify: str | None
) -> None:
    config = HALVES.model_copy(update={"group": grouped, "stratify": stratify})
    new = records_of(*(variant(IDS[n]) if n % 3 else synthetic(IDS[n]) for n in of))
    table = split_keys(concat([new, ORIGINALS] if first else [ORIGINALS, new]), config)
    config = freeze_settings(table, config)
    alone = assign_splits(split_keys(ORIGINALS, config), config).splits
    splits, rejections = assign_splits(table, config)
    of_new, of_originals = (splits[: len(of)], splits[len(of) :]) if first else (splits[40:], splits[:40])
    if first:
        assert (of_new == 0).all()
        assert (of_originals[sorted(set(of))] == 0).all()
        untouched = np.setdiff1d(np.arange(40), of)
        assert (of_originals[untouched] == alone[untouched]).all()
    else:
        assert (of_originals == alone).all()
        assert of_new.tolist() == [0 if alone[n] == 0 else -1 for n in of]
        for row, rejection in rejections.items():
            side = "test" if alone[of[row - 40]] == 2 else "validation"
            assert rejection.detail == f"was made of others and hangs together with `{side}` (f:{of[row - 40] + 1})"


def test_they_do_not_count_where_shares_are_settled() -> None:
    config = SplitsConfig(test=0.25, stratify="label")
    more = concat([ORIGINALS, records_of(*(synthetic() for _ in range(200)))])
    assert freeze_settings(split_keys(more, config), config) == freeze_settings(split_keys(ORIGINALS, config), config)
    alone = split_keys(records_of(synthetic("a"), variant("b")), config)
    with pytest.raises(UserError, match=r"^data\.splits: every record was derived from others"):
        freeze_settings(alone, config)
    everything = SplitsConfig(test=0)
    assert assign_splits(alone, freeze_settings(alone, everything)).splits.tolist() == [0, 0]


def test_their_moment_decides_nothing() -> None:
    config = SplitsConfig(by="time", time="at", since={"test": "2026-01-05"})
    originals = table_of(*({"text": f"text {day}", "meta": f'{{"at": "2026-01-0{day}"}}'} for day in (1, 6)))
    early, late = originals["id"].to_pylist()
    splits = assign_splits(
        split_keys(concat([originals, records_of(variant(early), variant(late), synthetic())]), config), config
    ).splits
    assert splits.tolist() == [0, 2, 0, -1, 0]


def test_a_drawn_share_holds_out_originals_alone() -> None:
    table = concat([ORIGINALS, records_of(*map(variant, IDS))])
    rest, held_out = hash_split(table, 0.5)
    assert origin_ids(held_out).null_count == held_out.num_rows > 5
    kept, rejected, *_ = without_held_out_variants(rest, held_out, CHANGED.empty_table())
    assert sorted(rejected["kept"].to_pylist()) == sorted(held_out["id"].to_pylist())
    assert not set(origin_ids(kept).to_pylist()) & set(held_out["id"].to_pylist())
    assert kept.num_rows + rejected.num_rows == rest.num_rows


def test_what_was_made_of_a_test_record_that_a_step_has_rewritten() -> None:
    rest = records_of(
        variant("as it was read"), variant("between two steps"), variant("its twin"), variant("of another")
    )
    changed = pa.Table.from_pylist(
        [
            {"id": "between two steps", "before": "as it was read", "step": "normalise", "detail": ""},
            {"id": ORIGINALS["id"][0].as_py(), "before": "between two steps", "step": "pii", "detail": ""},
            {"id": ORIGINALS["id"][0].as_py(), "before": "its twin", "step": "pii", "detail": ""},
        ],
        CHANGED,
    )
    kept, rejected, *_ = without_held_out_variants(rest, ORIGINALS.slice(0, 1), changed)
    assert kept.num_rows == 1
    assert set(rejected["kept"].to_pylist()) == {ORIGINALS["id"][0].as_py()}


@pytest.mark.parametrize("mark", [variant, synthetic])
def test_the_check_finds_one_whose_origin_is_held_out(mark: object) -> None:
    first, other = records_of(mark(IDS[3])), ORIGINALS.slice(3, 1)  # type: ignore[operator]
    for tables in ({"train": first, "test": other}, {"train": other, "test": first}):
        (leak,) = find_leaks(tables)
        assert (leak.kind, leak.splits) == ("origin", ("train", "test"))
        assert leak.detail == "one is derived from the other, or both from a third"
    assert find_leaks({"train": first, "test": ORIGINALS.slice(4, 2)}) == []
    (leak,) = find_leaks({"train": records_of("{}", mark("q")).slice(1), "test": records_of(mark("q"))})  # type: ignore[operator]
    assert leak.kind == "origin"
