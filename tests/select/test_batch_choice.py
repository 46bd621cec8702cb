from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.select.batch import BATCH_SCHEMA, choose_batch
from posttrain.select.config import SelectConfig
from posttrain.select.hard_cases import FocusTargets, in_weak_classes, nearest_hard_case
from posttrain.select.scores.table import score_schema
from posttrain.select.selectors.registry import COLD_START_SELECTORS, SELECTORS
from posttrain.store.errors import UserError

LABELS = [f"class {number}" for number in range(5)]


def score_table(rows: int, seed: int = 0, width: int = 6) -> pa.Table:
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.ones(5), rows)
    order = np.argsort(-p, axis=1)
    vectors = generator.normal(size=(rows, width)).astype(np.float32)
    top = np.sort(p, axis=1)[:, ::-1]
    return pa.table(
        {
            "id": [f"{number:020x}" for number in generator.permutation(rows)],
            "source": ["pool.csv"] * rows,
            "cost": generator.uniform(5, 90, rows),
            "entropy": -(p * np.log(p)).sum(axis=1),
            "least_confidence": 1 - top[:, 0],
            "margin": top[:, 0] - top[:, 1],
            "predicted": [LABELS[row] for row in order[:, 0]],
            "runner_up": [LABELS[row] for row in order[:, 1]],
            "confidence": top[:, 0],
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), width),
            "probabilities": pa.FixedSizeListArray.from_arrays(pa.array(p.ravel(), pa.float32()), 5),
        },
        schema=score_schema(width, 5),
    )


def test_warm_batch_has_its_shares() -> None:
    scores = score_table(300)
    batch = choose_batch(SelectConfig().for_round(1), scores, 40, 1, targets=FocusTargets(["class 2"]), cold=False)
    assert batch.schema == BATCH_SCHEMA
    assert Counter(batch["reason"].to_pylist()) == {"focus": 10, "strategy": 26, "explore": 4}
    assert len(set(batch["id"].to_pylist())) == 40
    assert batch["rank"].to_pylist() == list(range(1, 41))
    by_id = {row["id"]: row for row in scores.to_pylist()}
    for row in batch.to_pylist():
        score = by_id[row["id"]]
        assert (row["uncertainty"], row["predicted"]) == (score["entropy"], score["predicted"])
        if row["reason"] == "focus":
            assert "class 2" in (score["predicted"], score["runner_up"])


def without_predictions(scores: pa.Table) -> pa.Table:
    """The score table before a champion is trained: no predictions."""
    nothing = pa.nulls(scores.num_rows, pa.string())
    return scores.set_column(scores.column_names.index("predicted"), scores.schema.field("predicted"), nothing)


def test_cold_batch_is_chosen_by_the_cold_start_strategy() -> None:
    scores = without_predictions(score_table(100))
    batch = choose_batch(SelectConfig().for_round(1), scores, 20, 1, targets=FocusTargets(["class 2"]), cold=True)
    assert set(batch["reason"].to_pylist()) == {"cold_start"}
    assert batch.num_rows == 20


def test_a_champion_with_uninformative_confidence_still_explores() -> None:
    batch = choose_batch(
        SelectConfig().for_round(2), score_table(100), 20, 1, targets=FocusTargets(["class 2"]), cold=True
    )
    assert Counter(batch["reason"].to_pylist()) == {"cold_start": 18, "explore": 2}
    assert [row["inclusion"] for row in batch.to_pylist() if row["reason"] == "explore"] == [0.02, 0.02]


@pytest.mark.parametrize("seed", range(6))
def test_exploration_and_focus_may_fill_a_small_batch(seed: int) -> None:
    config = SelectConfig(explore=0.5, focus=0.5, strategy="entropy")
    batch = choose_batch(config, score_table(60), 3, seed, targets=FocusTargets(LABELS), cold=False)
    assert batch.num_rows == 3


def with_sources(scores: pa.Table, names: list[str]) -> pa.Table:
    position = scores.column_names.index("source")
    return scores.set_column(
        position, scores.schema.field("source"), pa.array(np.resize(names, scores.num_rows), pa.string())
    )


@pytest.mark.parametrize("near_duplicate", [None, 0.9])
def test_the_budget_bounds_the_whole_batch(near_duplicate: float | None) -> None:
    scores = score_table(200)
    cost = dict(zip(scores["id"].to_pylist(), scores["cost"].to_pylist(), strict=True))
    for shares in ({"explore": 0.0, "focus": 0.0}, {"explore": 0.0, "focus": 0.5}, {"explore": 0.2, "focus": 0.3}):
        config = SelectConfig(strategy="cost_aware", options={"budget": 300.0}, near_duplicate=near_duplicate, **shares)
        rows = choose_batch(config, scores, 30, 0, targets=FocusTargets(["class 2"]), cold=False).to_pylist()
        explore_cost = sum(cost[row["id"]] for row in rows if row["reason"] == "explore")
        assert sum(cost[row["id"]] for row in rows) <= max(300, explore_cost)
        assert explore_cost > 300 or len(rows) > 6


def test_quotas_bound_the_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    scores = with_sources(score_table(200), ["a", "b", "c"])
    source = dict(zip(scores["id"].to_pylist(), scores["source"].to_pylist(), strict=True))
    options = {"quotas": {"a": 0.2, "b": 0.29, "rare": 0.5}}
    config = SelectConfig(strategy="composite", options=options, explore=0.0, focus=0.5)
    batch = choose_batch(config, scores, 100, 0, targets=FocusTargets(["class 2"]), cold=False)
    counts = Counter(source[id] for id in batch["id"].to_pylist())
    assert (counts["a"], counts["b"], counts["c"]) == (20, 29, 51)
    assert "the quota of `rare` bounds nothing" in caplog.text
    # A batch is full even if one source has no record of a weak class.
    first = scores.filter(pa.array(scores["source"].to_numpy(zero_copy_only=False) != "b")).to_pylist()[0]
    assert choose_batch(config, scores, 4, 0, targets=FocusTargets([first["predicted"]]), cold=False).num_rows == 4


def test_a_cold_strategy_uses_all_its_options_but_those_of_uncertainty() -> None:
    scores = without_predictions(score_table(80))
    with_options, without_options = (
        choose_batch(
            SelectConfig(strategy=["diverse", "margin"], options=options).for_round(1), scores, 8, 0, cold=True
        )
        for options in ({"diverse": {"dimensions": 2}}, {})
    )
    assert not with_options.equals(without_options)
    by_margin = SelectConfig(options={"facility_location": {"by": "margin", "ground": 50}}).for_round(1)
    assert choose_batch(by_margin, scores, 8, 0, cold=True).num_rows == 8


@pytest.mark.parametrize(
    ("strategy", "cold"),
    [*((name, False) for name in sorted(SELECTORS)), *((name, True) for name in COLD_START_SELECTORS)],
)
def test_row_order_of_the_table_does_not_matter(strategy: str, cold: bool) -> None:
    options = {"by": "confidence", "lowest": True} if strategy == "top" else {}
    config = SelectConfig.model_validate({"cold_start" if cold else "strategy": strategy, "options": options})
    scores = score_table(80)
    shuffled = scores.take(pa.array(np.random.default_rng(5).permutation(80)))
    first, second = (
        choose_batch(config, table, 16, 3, targets=FocusTargets(["class 1"]), cold=cold) for table in (scores, shuffled)
    )
    assert first.equals(second)


def test_without_focus_targets_the_strategy_fills_the_batch() -> None:
    batch = choose_batch(SelectConfig(explore=0.0).for_round(1), score_table(50), 10, 0, cold=False)
    assert set(batch["reason"].to_pylist()) == {"strategy"}
    assert batch.num_rows == 10


def test_small_and_empty_pools() -> None:
    for cold in (True, False):
        assert choose_batch(SelectConfig().for_round(1), score_table(7), 150, 0, cold=cold).num_rows == 7
        empty = choose_batch(SelectConfig().for_round(1), score_table(0), 150, 0, cold=cold)
        assert empty.num_rows == 0
        assert empty.schema == BATCH_SCHEMA


@pytest.mark.slow
def test_exploration_is_an_unbiased_sample_of_the_pool() -> None:
    scores = score_table(20)
    config = SelectConfig(explore=0.5, focus=0.0, strategy="entropy")
    counts: Counter[str] = Counter()
    for seed in range(200):
        batch = choose_batch(config, scores, 8, seed, cold=False).to_pylist()
        counts.update(row["id"] for row in batch if row["reason"] == "explore")
    # Each of the 20 is drawn binomial(200, 0.2) times: mean 40, five standard deviations 28.
    assert max(abs(counts[id] - 40) for id in scores["id"].to_pylist()) < 29


def test_hard_cases_focus_on_their_neighbours() -> None:
    scores = score_table(400)
    vectors = np.array(scores["embedding"].to_pylist(), np.float32)
    near = nearest_hard_case(vectors, vectors[17:18], neighbours=5) >= 0
    assert near.sum() == 5
    assert near[17]
    batch = choose_batch(
        SelectConfig(explore=0.0).for_round(1),
        scores,
        20,
        0,
        targets=FocusTargets(embeddings=vectors[17:18]),
        cold=False,
    ).to_pylist()
    focused = {row["id"] for row in batch if row["reason"] == "focus"}
    assert len(focused) == 5
    pool = np.array(scores["id"].to_pylist())
    assert focused <= set(pool[nearest_hard_case(vectors, vectors[17:18]) >= 0])


def test_a_weak_class_counts_as_prediction_and_as_runner_up() -> None:
    predicted, runner_up = np.array(["a", "b", "b"], object), np.array(["b", "a", "c"], object)
    assert in_weak_classes(predicted, runner_up, ["a"]).tolist() == [True, True, False]
    assert in_weak_classes(predicted, runner_up, ["c", "d"]).tolist() == [False, False, True]


def test_focus_without_anything_to_focus_on() -> None:
    nothing = np.array([None, None], dtype=object)
    assert in_weak_classes(nothing, nothing, ["a"]).tolist() == [False, False]
    assert in_weak_classes(np.array(["a", "b"], object), nothing, []).tolist() == [False, False]
    assert nearest_hard_case(np.ones((3, 2)), np.empty((0, 2))).tolist() == [-1] * 3
    assert nearest_hard_case(np.empty((0, 2)), np.ones((1, 2))).tolist() == []


def test_config_refuses_unusable_strategies() -> None:
    with pytest.raises(UserError, match="did you mean `uncertain_diverse`"):
        SelectConfig.read({"strategy": "uncertain_divers"}, "posttrain.yaml")
    for strategy in set(SELECTORS) - set(COLD_START_SELECTORS):
        with pytest.raises(
            UserError, match=f"`cold_start`: strategy `{strategy}` .*; use random, diverse, .* or facility_"
        ):
            SelectConfig.read({"cold_start": strategy}, "posttrain.yaml")
    with pytest.raises(UserError, match=r"^--strategy: strategy `margin` .* free text has none; use entropy"):
        SelectConfig(strategy="margin").check(False, "--strategy")
    SelectConfig(strategy="margin").check(True)
    SelectConfig(strategy="entropy").check(False)


@pytest.mark.parametrize("strategy", sorted(SELECTORS))
def test_every_strategy_works_in_the_loop(strategy: str) -> None:
    by_confidence = {"by": "confidence"} if strategy == "top" else {}
    SelectConfig(strategy=strategy, options=by_confidence).check(True)


@pytest.mark.parametrize(
    ("section", "has_labels", "message"),
    [
        ({"strategy": "top"}, True, "none is named"),
        ({"strategy": "badge"}, False, "`badge` needs the score column `probabilities`"),
        ({"strategy": "mmr", "options": {"relevence": 1}}, True, "'relevence'"),
        ({"strategy": "mmr", "options": {"relevance": 2}}, True, "relevance is 2, and must be from 0 to 1"),
        ({"strategy": "mmr", "options": {"by": "margin"}}, False, "free text has none"),
        ({"strategy": "composite", "options": {"quotas": {"web": 2}}}, True, "the share of `web` is 2"),
        ({"strategy": "cost_aware", "options": {"budget": "much"}}, True, "`budget` is 'much', and must be a number"),
    ],
)
def test_options_are_checked_before_any_work(section: dict[str, Any], has_labels: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SelectConfig.model_validate(section).check(has_labels)


@pytest.mark.parametrize("strategy", sorted(SELECTORS))
def test_every_strategy_accepts_labelled_records(strategy: str) -> None:
    options = {"by": "confidence"} if strategy == "top" else {}
    config = SelectConfig(strategy=strategy, options=options)
    labelled = np.random.default_rng(1).normal(size=(30, 6)).astype(np.float32)
    scores = score_table(90)
    batch = choose_batch(config, scores, 20, 2, targets=FocusTargets(["class 1"]), labelled=labelled, cold=False)
    assert len(set(batch["id"].to_pylist())) == 20
    assert set(batch["id"].to_pylist()) <= set(scores["id"].to_pylist())


def test_records_near_labelled_ones_are_covered() -> None:
    scores = score_table(100)
    embeddings = np.array(scores.sort_by("id")["embedding"].to_pylist(), np.float32)
    near = embeddings[:95] + 1e-3
    config = SelectConfig(strategy="k_center", options={"dimensions": None}, explore=0, focus=0)
    batch = choose_batch(config, scores, 5, 0, labelled=near, cold=False)
    assert set(batch["id"].to_pylist()) == set(scores.sort_by("id")["id"].to_pylist()[95:])


def test_options_are_passed_to_the_strategy() -> None:
    narrow = SelectConfig(strategy="top", options={"by": "cost", "lowest": True}, explore=0, focus=0)
    scores = score_table(60)
    batch = choose_batch(narrow, scores, 5, 0, cold=False)
    cheapest = scores.sort_by("cost")["id"].to_pylist()[:5]
    assert batch["id"].to_pylist() == cheapest
    with pytest.raises(UserError, match="exceed the whole batch"):
        SelectConfig.read({"explore": 0.7, "focus": 0.5}, "posttrain.yaml")
    with pytest.raises(UserError, match="did you mean `explore`"):
        SelectConfig.read({"explor": 0.7}, "posttrain.yaml")
