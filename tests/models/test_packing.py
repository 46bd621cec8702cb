"""Layout of a packed row, against a packing that goes token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.models.attention_plan import AttentionPlan
from posttrain.models.chat import TokenizedExample
from posttrain.models.packing import Packed, Unit, micro_batches, pack, packs

SEQUENCES = st.integers(2, 7).flatmap(
    lambda length: st.builds(
        TokenizedExample,
        st.lists(st.integers(0, 2), min_size=length, max_size=length),
        st.lists(st.booleans(), min_size=length, max_size=length),
    )
)
UNITS = st.lists(st.lists(SEQUENCES, min_size=1, max_size=3), min_size=1, max_size=4)


def attended_positions(row: Packed) -> list[set[int]]:
    """The positions of the row that each of its tokens attends to."""
    result: list[set[int]] = [set() for _ in range(row.ids.shape[1])]
    plan: AttentionPlan = row.plan
    offset = 0
    for group in plan.groups:
        for number, queries in enumerate(group.queries.tolist()):
            hidden = [False] * group.before.shape[1] if group.hidden is None else group.hidden[number].tolist()
            before = [
                index for index, is_hidden in zip(group.before[number].tolist(), hidden, strict=True) if not is_hidden
            ]
            for position, query in enumerate(queries):
                if plan.real is None or plan.real[offset]:
                    result[query] = {*before, *queries[: position + 1]}
                offset += 1
    return result


@pytest.mark.slow
@given(units=UNITS, padded=st.booleans())
def test_a_supervised_token_is_predicted_from_its_context(units: list[Unit], padded: bool) -> None:
    row = pack(units, padded=padded)
    assert row.pairs == sum(map(len, attended_positions(row)))
    sequences = [sequence for unit in units for sequence in unit]
    expected = [
        (number, position, sequence.ids[position])
        for number, sequence in enumerate(sequences)
        for position, on in enumerate(sequence.supervised)
        if on and position > 0
    ]
    assert row.sequence.tolist() == [number for number, _, _ in expected]
    assert row.targets.tolist() == [token for _, _, token in expected]
    attended, ids, positions = attended_positions(row), row.ids[0].tolist(), row.positions[0].tolist()
    for (number, position, _), predicting in zip(expected, row.predicting.tolist(), strict=True):
        context = sorted(attended[predicting], key=lambda other: positions[other])
        assert [ids[other] for other in context] == sequences[number].ids[:position]
        assert [positions[other] for other in context] == list(range(position))
    assert (row.sequences, row.tokens) == (len(sequences), sum(len(item.ids) for item in sequences))
    if padded:
        assert len(ids) == row.tokens - row.sequences
    for tensor in (row.ids, row.positions, row.predicting, row.targets, row.sequence):
        assert tensor.dtype == torch.long


def plain_values(row: Packed) -> list[object]:
    """All of a row as plain values."""
    plan = row.plan
    groups = [part for group in plan.groups for part in (group.queries, group.before, group.hidden)]
    others = [value for name, value in vars(row).items() if name != "plan"]
    result = [*groups, plan.order, plan.inverse, plan.real, plan.spans, *others]
    return [(item.dtype, item.tolist()) if isinstance(item, torch.Tensor) else item for item in result]


@pytest.mark.slow
@given(batches=st.lists(UNITS, min_size=1, max_size=4), padded=st.booleans())
def test_packs_equals_pack_of_each_micro_batch(batches: list[list[Unit]], padded: bool) -> None:
    rows = [plain_values(row) for row in packs(batches, padded=padded)]
    assert rows == [plain_values(pack(units, padded=padded)) for units in batches]


@given(units=UNITS, budget=st.integers(1, 40))
def test_micro_batches_hold_every_unit_once_within_the_budget(units: list[Unit], budget: int) -> None:
    parts = list(micro_batches(units, budget))
    assert [unit for part in parts for unit in part] == units
    sizes = [sum(len(sequence.ids) for unit in part for sequence in unit) for part in parts]
    assert all(size <= budget or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    sizes_with_next = [
        size + sum(len(item.ids) for item in part[0]) for size, part in zip(sizes, parts[1:], strict=False)
    ]
    assert all(size > budget for size in sizes_with_next), "the next unit did not fit"


@pytest.mark.parametrize("answer", [[4], [4, 5, 6]])
def test_a_shared_prefix_is_packed_once(answer: list[int]) -> None:
    def example(*ids: int) -> TokenizedExample:
        return TokenizedExample([*ids, *answer], [False] * len(ids) + [True] * len(answer))

    system, first, second = [9, 9, 9], [1, 2], [3, 2]
    pairs = [
        [example(*system, *first), example(*system, *first)],
        [example(*system, *second), example(*system, *second)],
    ]
    # The last token of a prompt is repeated for each answer, because it predicts a supervised token.
    assert pack(pairs).ids.shape[1] == 3 + 2 * (1 + 2 * len(answer))
    assert pack(pairs, padded=True).ids.shape[1] == 4 * (4 + len(answer))
