from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.select.batch import BATCH_SCHEMA, choose_batch
from posttrain.select.config import SelectConfig
from posttrain.select.hard_cases import FocusTargets, in_weak_classes, nearest_hard_case
from posttrain.select.pool_sample import with_sample_sizes
from posttrain.select.scores.table import score_schema
from posttrain.select.selectors.registry import SELECTORS
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


def choose(config: SelectConfig, scores: pa.Table, n: int, seed: int, *, cold: bool, **options: Any) -> pa.Table:
    return choose_batch(config, config.batch_strategy(cold=cold), scores, n, seed, **options)


def test_warm_batch_has_its_shares() -> None:
    scores = score_table(300)
    batch = choose(SelectConfig(), scores, 40, 1, targets=FocusTargets(["class 2"]), cold=False)
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
    batch = choose(SelectConfig(), scores, 20, 1, targets=FocusTargets(["class 2"]), cold=True)
    assert set(batch["reason"].to_pylist()) == {"cold_start"}
    assert batch.num_rows == 20


def test_a_champion_with_uninformative_confidence_still_explores() -> None:
    batch = choose(SelectConfig(), score_table(100), 20, 1, targets=FocusTargets(["class 2"]), cold=True)
    assert Counter(batch["reason"].to_pylist()) == {"cold_start": 18, "explore": 2}
    assert [row["inclusion"] for row in batch.to_pylist() if row["reason"] == "explore"] == [0.02, 0.02]


@pytest.mark.parametrize("seed", range(6))
def test_exploration_and_focus_may_fill_a_small_batch(seed: int) -> None:
    config = SelectConfig(explore=0.5, focus=0.5, strategy="entropy")
    batch = choose(config, score_table(60), 3, seed, targets=FocusTargets(LABELS), cold=False)
    assert batch.num_rows == 3


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("strategy", sorted(SELECTORS))
def test_row_order_of_the_table_does_not_matter(strategy: str, cold: bool) -> None:
    config = SelectConfig(strategy=strategy, options={"by": "confidence"} if strategy == "top" else {})
    scores = score_table(80)
    shuffled = scores.take(pa.array(np.random.default_rng(5).permutation(80)))
    first, second = (
        choose(config, table, 16, 3, targets=FocusTargets(["class 1"]), cold=cold) for table in (scores, shuffled)
    )
    assert first.equals(second)


def test_without_focus_targets_the_strategy_fills_the_batch() -> None:
    batch = choose(SelectConfig(explore=0.0), score_table(50), 10, 0, cold=False)
    assert set(batch["reason"].to_pylist()) == {"strategy"}
    assert batch.num_rows == 10


def test_small_and_empty_pools() -> None:
    for cold in (True, False):
        assert choose(SelectConfig(), score_table(7), 150, 0, cold=cold).num_rows == 7
        empty = choose(SelectConfig(), score_table(0), 150, 0, cold=cold)
        assert empty.num_rows == 0
        assert empty.schema == BATCH_SCHEMA


@pytest.mark.slow
def test_exploration_is_an_unbiased_sample_of_the_pool() -> None:
    scores = score_table(20)
    config = SelectConfig(explore=0.5, focus=0.0, strategy="entropy")
    counts: Counter[str] = Counter()
    for seed in range(200):
        batch = choose(config, scores, 8, seed, cold=False).to_pylist()
        counts.update(row["id"] for row in batch if row["reason"] == "explore")
    # Each of the 20 is drawn binomial(200, 0.2) times: mean 40, five standard deviations 28.
    assert max(abs(counts[id] - 40) for id in scores["id"].to_pylist()) < 29


def test_hard_cases_focus_on_their_neighbours() -> None:
    scores = score_table(400)
    vectors = np.array(scores["embedding"].to_pylist(), np.float32)
    near = nearest_hard_case(vectors, vectors[17:18], neighbours=5) >= 0
    assert near.sum() == 5
    assert near[17]
    batch = choose(
        SelectConfig(explore=0.0),
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
        ({"strategy": "uncertain_diverse", "options": {"pool_factor": 0}}, True, "`pool_factor` is 0, and must be"),
        ({"options": {"pool_factor": 3}}, True, "`facility_location`.* 'pool_factor'"),
        ({"strategy": "margin"}, False, "strategy `margin` .* free text has none; use entropy"),
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
    batch = choose(config, scores, 20, 2, targets=FocusTargets(["class 1"]), labelled=labelled, cold=False)
    assert len(set(batch["id"].to_pylist())) == 20
    assert set(batch["id"].to_pylist()) <= set(scores["id"].to_pylist())


def test_records_near_labelled_ones_are_covered() -> None:
    scores = score_table(100)
    embeddings = np.array(scores.sort_by("id")["embedding"].to_pylist(), np.float32)
    near = embeddings[:95] + 1e-3
    config = SelectConfig(strategy="facility_location", options={"dimensions": None}, explore=0, focus=0)
    batch = choose(config, scores, 5, 0, labelled=near, cold=False)
    assert set(batch["id"].to_pylist()) == set(scores.sort_by("id")["id"].to_pylist()[95:])


def test_options_are_passed_to_the_strategy() -> None:
    by_margin = SelectConfig(strategy="top", options={"by": "margin"}, explore=0, focus=0, near_duplicate=None)
    scores = score_table(60)
    assert (
        choose(by_margin, scores, 5, 0, cold=False)["id"].to_pylist() == scores.sort_by("margin")["id"].to_pylist()[:5]
    )
    with pytest.raises(UserError, match="exceed the whole batch"):
        SelectConfig.read({"explore": 0.7, "focus": 0.5}, "posttrain.yaml")
    with pytest.raises(UserError, match="did you mean `explore`"):
        SelectConfig.read({"explor": 0.7}, "posttrain.yaml")
    with pytest.raises(UserError, match="did you mean `uncertain_diverse`"):
        SelectConfig.read({"strategy": "uncertain_divers"}, "posttrain.yaml")


def test_a_fraction_of_a_record_is_explored_by_chance() -> None:
    """So that each record's probability is the share that the batch says."""
    config = SelectConfig(explore=0.05, focus=0.0, strategy="entropy")
    batches = [choose(config, score_table(50), 10, seed, cold=False) for seed in range(60)]
    counts = [batch["reason"].to_pylist().count("explore") for batch in batches]
    assert set(counts) == {0, 1}
    assert 15 < sum(counts) < 45


def test_inclusion_is_a_share_of_the_pool_of_which_a_sample_was_scored() -> None:
    config = SelectConfig(explore=0.5, focus=0.0, strategy="entropy")
    scores = with_sample_sizes(score_table(50), pa.table({"id": [str(number) for number in range(500)]}))
    batch = choose(config, scores, 10, 0, cold=False)
    assert [share for share in batch["inclusion"].to_pylist() if share is not None] == [5 / 500] * 5
