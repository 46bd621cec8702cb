"""Hard negatives and records between two labels, against a search of one record after the other."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.select import hard_negatives as module
from posttrain.select.hard_negatives import boundary_records, confused_labels, hard_negatives
from posttrain.select.selectors.similarity import whiten

LABELS = ["a", "b", "c", "d"]
CONFUSED = {("a", "b"): 3, ("b", "c"): 1}


def predictions(*pairs: tuple[str, str | None]) -> pa.Table:
    expected, predicted = zip(*pairs, strict=True) if pairs else ((), ())
    return pa.table({"expected": pa.array(expected, pa.string()), "predicted": pa.array(predicted, pa.string())})


def test_confusions_count_errors_in_both_directions() -> None:
    answers = [("b", "a"), ("a", "b"), ("a", "a"), ("c", "b"), ("d", "b"), ("d", "b"), ("a", None), ("a", "unknown")]
    assert list(confused_labels(predictions(*answers), LABELS).items()) == [
        (("a", "b"), 2),
        (("b", "d"), 2),
        (("b", "c"), 1),
    ]
    assert list(confused_labels(predictions(*answers), LABELS, limit=1)) == [("a", "b")]
    assert confused_labels(predictions(("a", "a")), LABELS) == {} == confused_labels(predictions(), LABELS)


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 4))
def test_a_hard_negative_is_the_nearest_record_of_a_confused_label(seed: int, count: int, used: int) -> None:
    generator = np.random.default_rng(seed)
    embeddings = generator.normal(size=(count, 5))
    labels = [LABELS[code] for code in generator.integers(used, size=count)]
    result = hard_negatives(embeddings, labels, CONFUSED)
    points = whiten(embeddings)
    for row, label in enumerate(labels):
        partners = {"a": "b", "b": "ac", "c": "b"}.get(label, "")
        among = [other for other in range(count) if labels[other] in partners]
        assert result.is_confused[row] == bool(among)
        among = among or [other for other in range(count) if labels[other] != label]
        if among:
            similarity = points[among] @ points[row]
            assert labels[result.rows[row]] != label
            assert result.rows[row] in among
            assert result.similarity[row] == pytest.approx(similarity.max(), abs=1e-5)
            assert points[result.rows[row]] @ points[row] == pytest.approx(similarity.max(), abs=1e-5)
        else:
            assert result.rows[row] == -1
            assert np.isnan(result.similarity[row])


def test_without_confusions_any_other_label_is_near_enough_and_ties_go_to_the_first_row() -> None:
    embeddings = np.array([[0.0, 1], [0, 1], [1, 0], [0, 1]])
    result = hard_negatives(embeddings, ["a", "b", "b", "b"], {})
    assert result.rows.tolist() == [1, 0, 0, 0]
    assert not result.is_confused.any()
    assert hard_negatives(np.zeros((0, 3)), [], CONFUSED).rows.tolist() == []


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(2)
    embeddings, pool = generator.normal(size=(40, 6)), generator.normal(size=(50, 6))
    labels = [LABELS[code] for code in generator.integers(4, size=40)]
    whole = hard_negatives(embeddings, labels, CONFUSED), boundary_records(pool, embeddings, labels, CONFUSED)
    monkeypatch.setattr(module, "_rows_per_block", lambda others: 7)
    parts = hard_negatives(embeddings, labels, CONFUSED), boundary_records(pool, embeddings, labels, CONFUSED)
    assert (parts[0].rows == whole[0].rows).all()
    assert [(each.row, each.labels) for each in parts[1]] == [(each.row, each.labels) for each in whole[1]]


@pytest.mark.parametrize("seed", range(5))
def test_records_on_a_boundary_are_those_about_as_near_to_two_confused_labels(seed: int) -> None:
    generator = np.random.default_rng(seed)
    pool, labelled = generator.normal(size=(80, 4)), generator.normal(size=(30, 4))
    labels = [LABELS[code] for code in generator.integers(4, size=30)]
    result = boundary_records(pool, labelled, labels, CONFUSED, per_pair=5)
    points = whiten(np.concatenate([pool, labelled])).astype(np.float64)
    expected = []
    for pair in CONFUSED:
        ratios = []
        for row in range(80):
            distances = {
                name: min(
                    np.linalg.norm(points[row] - points[80 + other]) for other in range(30) if labels[other] == name
                )
                for name in set(labels)
            }
            near, far = sorted(distances, key=lambda name: distances[name])[:2]
            if {near, far} == set(pair):
                ratios.append((-distances[near] / distances[far], row, (near, far)))
        expected += sorted(ratios)[:5]
    assert len(expected) > 5
    assert [(each.row, each.labels) for each in result] == [(row, names) for _, row, names in expected]
    assert [each.ratio for each in result] == pytest.approx([-ratio for ratio, _, _ in expected], abs=1e-3)


def test_there_is_no_boundary_of_one_label_or_without_confusions() -> None:
    pool, labelled = np.eye(3), np.eye(3)
    assert boundary_records(pool, labelled, ["a", "a", "a"], CONFUSED) == []
    assert boundary_records(pool, labelled, ["a", "b", "a"], {}) == []
    assert boundary_records(pool[:0], labelled, ["a", "b", "a"], CONFUSED) == []
