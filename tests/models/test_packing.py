"""What stands where in a packed row, against a packing that goes token by token."""

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


def seen(row: Packed) -> list[set[int]]:
    """The places in the row that each token of it attends to."""
    result: list[set[int]] = [set() for _ in range(row.ids.shape[1])]
    plan: AttentionPlan = row.plan
    done = 0
    for group in plan.groups:
        for number, queries in enumerate(group.queries.tolist()):
            hidden = [False] * group.before.shape[1] if group.hidden is None else group.hidden[number].tolist()
            before = [at for at, off in zip(group.before[number].tolist(), hidden, strict=True) if not off]
            for place, query in enumerate(queries):
                if plan.real is None or plan.real[done]:
                    result[query] = {*before, *queries[: place + 1]}
                done += 1
    return result


@given(units=UNITS, padded=st.booleans())
def test_every_supervised_token_is_predicted_from_what_stands_before_it(units: list[Unit], padded: bool) -> None:
    row = pack(units, padded=padded)
    assert row.pairs == sum(map(len, seen(row)))
    sequences = [sequence for unit in units for sequence in unit]
    wanted = [
        (number, place, sequence.ids[place])
        for number, sequence in enumerate(sequences)
        for place, on in enumerate(sequence.supervised)
        if on and place > 0
    ]
    assert row.sequence.tolist() == [number for number, _, _ in wanted]
    assert row.targets.tolist() == [token for _, _, token in wanted]
    attended, ids, positions = seen(row), row.ids[0].tolist(), row.positions[0].tolist()
    for (number, place, _), at in zip(wanted, row.predicting.tolist(), strict=True):
        context = sorted(attended[at], key=lambda other: positions[other])
        assert [ids[other] for other in context] == sequences[number].ids[:place]
        assert [positions[other] for other in context] == list(range(place))
    assert (row.sequences, row.tokens) == (len(sequences), sum(len(item.ids) for item in sequences))
    if padded:
        assert len(ids) == row.tokens - row.sequences
    for values in (row.ids, row.positions, row.predicting, row.targets, row.sequence):
        assert values.dtype == torch.long


def values(row: Packed) -> list[object]:
    """All of a row as plain values."""
    plan = row.plan
    groups = [part for group in plan.groups for part in (group.queries, group.before, group.hidden)]
    rest = [value for name, value in vars(row).items() if name != "plan"]
    result = [*groups, plan.order, plan.inverse, plan.real, plan.spans, *rest]
    return [(item.dtype, item.tolist()) if isinstance(item, torch.Tensor) else item for item in result]


@given(parts=st.lists(UNITS, min_size=1, max_size=4), padded=st.booleans())
def test_micro_batches_packed_together_are_as_each_alone(parts: list[list[Unit]], padded: bool) -> None:
    together = [values(row) for row in packs(parts, padded=padded)]
    assert together == [values(pack(units, padded=padded)) for units in parts]


@given(units=UNITS, budget=st.integers(1, 40))
def test_micro_batches_hold_every_unit_once_within_their_limit(units: list[Unit], budget: int) -> None:
    parts = list(micro_batches(units, budget))
    assert [unit for part in parts for unit in part] == units
    sizes = [sum(len(sequence.ids) for unit in part for sequence in unit) for part in parts]
    assert all(size <= budget or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    joined = [size + sum(len(item.ids) for item in part[0]) for size, part in zip(sizes, parts[1:], strict=False)]
    assert all(size > budget for size in joined), "no room is left"


@pytest.mark.parametrize("answer", [[4], [4, 5, 6]])
def test_what_is_shared_stands_once(answer: list[int]) -> None:
    def asked(*ids: int) -> TokenizedExample:
        return TokenizedExample([*ids, *answer], [False] * len(ids) + [True] * len(answer))

    system, first, second = [9, 9, 9], [1, 2], [3, 2]
    pairs = [[asked(*system, *first), asked(*system, *first)], [asked(*system, *second), asked(*system, *second)]]
    # Of each prompt the last token stands once an answer, as it predicts a supervised one.
    assert pack(pairs).ids.shape[1] == 3 + 2 * (1 + 2 * len(answer))
    assert pack(pairs, padded=True).ids.shape[1] == 4 * (4 + len(answer))
