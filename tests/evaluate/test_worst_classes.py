from posttrain.evaluate.metrics import ClassMetrics, worst_classes


def rows(*counts: tuple[str, int, int, int]) -> list[dict[str, object]]:
    return [ClassMetrics(*count).as_dict() for count in counts]


def test_classes_below_the_average_come_worst_first() -> None:
    result = worst_classes(rows(("good", 50, 50, 48), ("bad", 50, 50, 10), ("worse", 50, 50, 2)))
    assert result == ["worse", "bad"]


def test_a_rare_class_is_not_the_worst_after_one_wrong_answer() -> None:
    table = rows(("rare", 1, 0, 0), ("poor", 100, 100, 20), *((f"fine {i}", 100, 100, 90) for i in range(5)))
    assert worst_classes(table) == ["poor", "rare"]
    assert worst_classes(table, strength=0.0) == ["rare", "poor"]


def test_without_wrong_answers_or_classes_none_is_worst() -> None:
    assert worst_classes(rows(("a", 5, 5, 5), ("b", 5, 5, 5))) == []
    assert worst_classes([]) == []
    assert worst_classes(rows(("a", 0, 0, 0))) == []


def test_the_number_is_limited_and_ties_are_ordered_by_name() -> None:
    table = rows(("c", 9, 9, 1), ("a", 9, 9, 1), ("b", 9, 9, 1), ("z", 9, 9, 9))
    assert worst_classes(table, n=2) == ["a", "b"]
