import pyarrow as pa

from posttrain.evaluate.hard_cases import hard_cases, losses, worst_classes
from posttrain.evaluate.metrics import ClassRow
from posttrain.evaluate.suite import PREDICTIONS


def rows(*counts: tuple[str, int, int, int]) -> list[dict[str, object]]:
    return [ClassRow(*count).as_dict() for count in counts]


def predictions(*rows: tuple[str, float, float | None]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "id": id,
                "expected": "a",
                "predicted": "b",
                "score": score,
                "valid": True,
                "log_likelihood": likely,
            }
            for id, score, likely in rows
        ],
        schema=PREDICTIONS,
    )


def test_worst_first_and_only_below_the_average() -> None:
    found = worst_classes(rows(("good", 50, 50, 48), ("bad", 50, 50, 10), ("worse", 50, 50, 2)))
    assert found == ["worse", "bad"]


def test_a_rare_class_is_not_worst_for_one_unlucky_answer() -> None:
    table = rows(("rare", 1, 0, 0), ("poor", 100, 100, 20), *((f"fine {i}", 100, 100, 90) for i in range(5)))
    assert worst_classes(table) == ["poor", "rare"]
    assert worst_classes(table, strength=0.0) == ["rare", "poor"]


def test_no_class_is_worst_where_all_are_right_or_there_are_none() -> None:
    assert worst_classes(rows(("a", 5, 5, 5), ("b", 5, 5, 5))) == []
    assert worst_classes([]) == []
    assert worst_classes(rows(("a", 0, 0, 0))) == []


def test_the_number_of_classes_and_ties_by_name() -> None:
    table = rows(("c", 9, 9, 1), ("a", 9, 9, 1), ("b", 9, 9, 1), ("z", 9, 9, 9))
    assert worst_classes(table, n=2) == ["a", "b"]


def test_loss_is_likelihood_where_known_else_what_is_missing_to_a_full_score() -> None:
    assert losses(predictions(("x", 0.0, -3.0), ("y", 0.25, None))).tolist() == [3.0, 0.75]


def test_hard_cases_are_wrong_and_hardest_first() -> None:
    table = predictions(("a", 1.0, -9.0), ("b", 0.0, -2.0), ("c", 0.0, -5.0), ("e", 0.0, -2.0), ("d", 1.0, -0.1))
    assert hard_cases(table) == ["c", "b", "e"]
    assert hard_cases(table, n=1) == ["c"]
    assert hard_cases(predictions()) == []


def test_hard_cases_of_likelihood_scores() -> None:
    table = predictions(("a", -9.0, -9.0), ("b", -2.0, -2.0), ("c", -5.0, -5.0), ("d", -1.0, -1.0))
    assert hard_cases(table) == ["a", "c"]
