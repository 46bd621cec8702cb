import numpy as np

from posttrain.select.hard_cases import HardCase, nearest_hard_case
from posttrain.select.reasons import hard_case_reasons
from posttrain.select.selectors.similarity import whiten


def test_each_record_is_assigned_to_the_closest_case_it_is_a_neighbour_of() -> None:
    generator = np.random.default_rng(3)
    pool, cases = generator.normal(size=(60, 7)), generator.normal(size=(5, 7))
    result = nearest_hard_case(pool, cases, neighbours=8)
    points = whiten(np.concatenate([pool, cases]))
    similarity = points[60:] @ points[:60].T
    expected = np.full(60, -1)
    for row in range(60):
        near = [case for case in range(5) if (similarity[case] > similarity[case, row]).sum() < 8]
        if near:
            expected[row] = max(near, key=lambda case: similarity[case, row])
    assert result.tolist() == expected.tolist()


def test_the_reason_names_the_case_and_its_kinds() -> None:
    cases = [HardCase("3fa2", ("wrong",), "card", "cash"), HardCase("77", ("high_loss", "disagreement"), "a", "a")]
    assert hard_case_reasons(np.array([-1, 1, 0]), cases) == [
        None,
        "near test record 77, of high loss and which two models answer differently",
        "near test record 3fa2, answered wrongly (`cash` for `card`)",
    ]
