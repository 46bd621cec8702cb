"""Mixes: shares by weights and sizes under a temperature and caps, and how often each record is used."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from posttrain.store.errors import UserError
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import MixConfig, PhaseConfig
from posttrain.train.data.epoch_plan import EpochPlan
from posttrain.train.data.mix import apportion, mix_counts, mix_parts

NAMES = "abcdefgh"


def kinds_of(*sizes: int) -> np.ndarray:
    return np.array([name for name, size in zip(NAMES, sizes, strict=False) for _ in range(size)])


def shares(sizes: tuple[int, ...], epochs: int | None = None, **settings: Any) -> list[int]:
    config = MixConfig(**settings)
    count = None if epochs is None else lambda total: epochs
    return [part.share for part in mix_parts(config, kinds_of(*sizes), np.arange(sum(sizes)), "here.mix", count)]


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    caps=st.lists(st.integers(0, 300), min_size=6, max_size=6),
    portion=st.floats(0, 1),
)
def test_a_capped_share_goes_to_the_others_by_weight(weights: list[float], caps: list[int], portion: float) -> None:
    weight, cap = np.array(weights), np.array(caps[: len(weights)])
    total = int(portion * cap.sum())
    result = np.array(apportion(total, np.log(weight), cap))
    assert result.sum() == total
    assert (result <= cap).all()
    # The level to which all fill: sum of min(cap, level x weight) is the total; by bisection.
    low, high = 0.0, float((cap / weight).max()) + 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(cap, middle * weight).sum() < total else (low, middle)
    assert np.abs(result - np.minimum(cap, high * weight)).max() < 1 + 1e-6


@pytest.mark.filterwarnings("error")
def test_tiny_weights_share_what_a_full_kind_leaves() -> None:
    logs = np.log([1e300, 3e-300, 1e-300]) * 10
    assert apportion(10, logs, np.array([4, 9, 9])) == [4, 6, 0]
    assert apportion(10, np.array([0.0, -5000.0, -5000.0 - np.log(2)]), np.array([4, 9, 9])) == [4, 4, 2]
    assert apportion(3, np.array([0.0, -5000.0]), np.array([0, 3])) == [0, 3]


def test_examples_are_mixed_in_proportion_up_to_a_limit() -> None:
    assert shares((1000, 200, 50), mix="sizes") == [1000, 200, 50]
    # Raffel et al. 2020, section 3.5.2: r_m = min(e_m, K) / sum of min(e_n, K).
    assert shares((1000, 200, 50), mix="sizes", mix_limit=300) == [300, 200, 50]


@pytest.mark.parametrize("temperature", [1.0, 2.0, 1 / 0.3, 1e6])
def test_a_temperature_evens_out_the_shares(temperature: float) -> None:
    sizes = np.array([1000, 200, 50])
    limited = np.minimum(sizes, 400)
    exact = limited ** (1 / temperature) / (limited ** (1 / temperature)).sum() * limited.sum()
    result = shares((1000, 200, 50), mix="sizes", mix_limit=400, mix_temperature=temperature)
    assert np.abs(result - exact).max() < 1
    assert sum(result) == limited.sum()


def test_weights_have_a_temperature_too() -> None:
    assert shares((60, 60), mix={"a": 9, "b": 1}, mix_temperature=2) == [90, 30]
    assert shares((60, 60), mix={"a": 1e-300, "b": 1e300}, mix_temperature=1e9) == [60, 60]


def test_mix_epochs_limits_the_uses_of_a_record() -> None:
    # 3 passes of 100 records: a's 10 records, at most 6 times each, fill 20 of a pass.
    assert shares((10, 90), 3, mix={"a": 1, "b": 1}, mix_epochs=6) == [20, 80]
    phase = PhaseConfig(mix={"a": 1, "b": 1}, mix_epochs=6, epochs=3)
    sampler = BatchSampler(100, 8, 0, [phase], kinds={"source": kinds_of(10, 90).tolist()})
    (counts,) = mix_counts(sampler, {"source": kinds_of(10, 90).tolist()})
    assert counts["kinds"]["a"] == {"records": 10, "met": 60, "epochs": 6.0, "fewest": 6, "most": 6}
    assert counts["kinds"]["b"]["met"] == 240
    with pytest.raises(UserError, match=r"here\.mix_epochs: 3 passes of 100 records meet some more than 2 times"):
        shares((10, 90), 3, mix={"a": 1, "b": 1}, mix_epochs=2)


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_steps_count_as_passes(steps: int) -> None:
    kinds = {"source": kinds_of(5, 35).tolist()}
    sampler = BatchSampler(40, 4, 0, [PhaseConfig(mix={"a": 3, "b": 1}, mix_epochs=6, steps=steps)], kinds=kinds)
    assert sampler.seen().max() <= 6
    assert sampler.seen().sum() == 4 * steps


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    temperature=st.floats(0.5, 10),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    batch_size=st.integers(1, 9),
)
def test_mix_counts_are_exact_after_any_step(
    sizes: list[int], temperature: float, seed: int | None, batch_size: int
) -> None:
    names = kinds_of(*sizes).tolist()
    phase = PhaseConfig(mix="sizes", mix_temperature=temperature, epochs=2)
    weights = np.array(sizes) ** (1 / temperature)
    assume(0 not in apportion(len(names), np.log(weights)))
    sampler = BatchSampler(len(names), batch_size, seed, [phase, PhaseConfig(epochs=1)], kinds={"source": names})
    uses = np.zeros(len(names), np.int64)
    for step in range(sampler.steps):
        if step <= sampler.starts[1]:
            (counts,) = mix_counts(sampler, {"source": names}, step)
            uses_by_name = {name: uses[np.array(names) == name] for name in set(names)}
            assert {name: item["met"] for name, item in counts["kinds"].items()} == {
                name: name_uses.sum() for name, name_uses in uses_by_name.items()
            }
            assert all(item["most"] - item["fewest"] <= 1 for item in counts["kinds"].values())
        assert (sampler.seen(step) == uses).all()
        np.add.at(uses, sampler.rows(step), 1)
        if step > 12:
            return


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    temperature=st.floats(0.3, 8),
    limit=st.one_of(st.none(), st.integers(1, 50)),
    most=st.one_of(st.none(), st.integers(3, 9)),
    batch_size=st.integers(1, 9),
)
def test_every_pass_has_exact_shares_and_caps(
    sizes: list[int], temperature: float, limit: int | None, most: int | None, batch_size: int
) -> None:
    names = kinds_of(*sizes)
    phase = PhaseConfig(mix="sizes", mix_temperature=temperature, mix_limit=limit, mix_epochs=most, epochs=3)
    try:
        sampler = BatchSampler(len(names), batch_size, 0, [phase], kinds={"source": names.tolist()})
    except UserError:  # a share is less than a record, or the caps leave too little
        reject()
    config = MixConfig(mix="sizes", mix_temperature=temperature, mix_limit=limit, mix_epochs=most)
    parts = mix_parts(config, names, np.arange(len(names)), "here", lambda total: 3)
    assert sum(part.share for part in parts) == sum(min(size, limit or size) for size in sizes)
    for epoch in (1, 2, 3):
        (counts,) = mix_counts(sampler, {"source": names.tolist()}, sampler.steps // 3 * epoch)
        for name, part in zip(NAMES, parts, strict=False):
            result = counts["kinds"][name]
            assert result["met"] == epoch * part.share
            assert result["most"] - result["fewest"] <= 1
            assert result["most"] <= (most or result["most"])
            assert part.share <= (limit or part.share)


@given(sizes=st.lists(st.integers(1, 60), min_size=2, max_size=6), seed=st.one_of(st.none(), st.integers(0, 3)))
def test_kinds_are_interleaved_evenly_at_any_sample(sizes: list[int], seed: int | None) -> None:
    kinds = kinds_of(*sizes)
    parts = mix_parts(MixConfig(mix="sizes"), kinds, np.arange(len(kinds)), "here")
    plan = EpochPlan(parts, 7, seed)
    rows = np.concatenate([plan.rows(batch) for batch in range(plan.batches)])
    assert sorted(rows.tolist()) == list(range(len(kinds)))
    for part in parts:
        share = part.share / len(rows)
        uses = np.cumsum(np.isin(rows, part.rows))
        assert np.abs(uses - share * np.arange(1, len(rows) + 1)).max() <= (1 + len(parts) * share) / 2 + 1e-9


def test_passes_of_a_mix_are_shuffled() -> None:
    parts = mix_parts(MixConfig(mix="sizes"), kinds_of(20, 20), np.arange(40), "here")
    plan = EpochPlan(parts, 40, 0)
    first, second = plan.rows(0).tolist(), plan.rows(1).tolist()
    assert first != second
    assert first != EpochPlan(parts, 40, 1).rows(0).tolist()
    assert first[::2] != list(range(20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mix_temperature": 2}, "mix_temperature is for a mix"),
        ({"mix_limit": 2}, "mix_limit is for a mix"),
        ({"mix_epochs": 2}, "mix_epochs is for a mix"),
        ({"mix": "size"}, "`mix`: a mix is weights by name, or `sizes`"),
        ({"mix": {"a": "much"}}, "`mix`: the share of `a` is `much`"),
        ({"mix": {"a": float("inf")}}, "the share of `a` is `inf`"),
        ({"mix": "sizes", "mix_temperature": 0}, "mix_temperature"),
        ({"mix": "sizes", "mix_limit": 0}, "mix_limit"),
    ],
)
def test_an_invalid_mix_config_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PhaseConfig.read({"epochs": 1, **settings}, "here")
