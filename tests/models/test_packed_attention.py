"""Attention confined to pieces, against torch's own with a mask of who sees whom."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.models import attention, attention_plan
from posttrain.models.attention import packed_attention_forward
from posttrain.models.attention_plan import AttentionPlan, Segment, _prefix_positions, plan_attention

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6)


def pieces_of(drawn: list[tuple[int, int]]) -> list[Segment]:
    """Pieces one after another; each goes on from an earlier one or from none."""
    pieces: list[Segment] = []
    for length, back in drawn:
        start = pieces[-1].start + pieces[-1].length if pieces else 0
        pieces.append(Segment(start, length, len(pieces) - back if 0 < back <= len(pieces) else None))
    return pieces


def sees(pieces: list[Segment]) -> torch.Tensor:
    total = pieces[-1].start + pieces[-1].length
    mask = torch.zeros(total, total, dtype=torch.bool)
    for piece in pieces:
        own = slice(piece.start, piece.start + piece.length)
        mask[own, own] = torch.ones(piece.length, piece.length).tril().bool()
        parent = piece.parent
        while parent is not None:
            before = pieces[parent]
            mask[own, before.start : before.start + before.length] = True
            parent = before.parent
    return mask


def states(total: int, heads: int, shared: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, total, 16, dtype=torch.float64, generator=generator).requires_grad_()
        for count in (heads, shared, shared)
    ]


def check(pieces: list[Segment], row: AttentionPlan, heads: tuple[int, int], scale: float | None = None) -> None:
    """Values and gradients are those of torch's masked attention."""
    mask = sees(pieces)
    ours, theirs = states(len(mask), *heads), states(len(mask), *heads)
    actual, _ = packed_attention_forward(None, *ours, None, scaling=scale, plan=row)
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, attn_mask=mask, scale=scale, enable_gqa=True)
    expected = expected.transpose(1, 2)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(actual.shape, dtype=actual.dtype, generator=torch.Generator().manual_seed(1))
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    for first, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first.grad, other.grad, atol=1e-6, rtol=1e-5)


@settings(max_examples=60)
@given(drawn=SHAPES, heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]), one_group=st.booleans())
@example(drawn=[(5, 0)], heads=(4, 2), one_group=False)  # its queries lie in memory in another order than in the row
def test_it_is_masked_attention(drawn: list[tuple[int, int]], heads: tuple[int, int], one_group: bool) -> None:
    pieces = pieces_of(drawn)
    check(pieces, plan_attention(pieces, one_group=one_group), heads, 0.3)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_sequences_longer_than_a_tile(length: int) -> None:
    pieces = [Segment(0, length), Segment(length, 3, 0)]
    check(pieces, plan_attention(pieces), (2, 1))


def test_long_sequences_with_beginnings_of_other_lengths() -> None:
    """Tiles in which some see fewer keys than others."""
    pieces = [Segment(0, 5), Segment(5, 2), Segment(7, 300, 0), Segment(307, 297, 1)]
    row = plan_attention(pieces)
    assert any(group.hidden is not None and group.queries.shape[1] == 300 for group in row.groups)
    check(pieces, row, (4, 2))


def test_what_is_kept_does_not_grow_with_lengths() -> None:
    attention._causal_mask.cache_clear()
    for own in (2, 9, 270):
        for before in (0, 1, 30):
            query, keys = torch.randn(1, own, 3, 4), torch.randn(1, before + own, 4)
            attention.causal_attention(query, keys, keys, 0.5)
    assert attention._causal_mask.cache_info().currsize == 1


def test_the_way_of_accelerators_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout takes torch's kernel too; with next to none of it both ways can be compared."""
    pieces = [Segment(0, 5), Segment(5, 3, 0), Segment(8, 7, 0), Segment(15, 2)]
    item = states(17, 4, 2)
    ours, _ = packed_attention_forward(None, *item, None, plan=plan_attention(pieces))
    theirs, _ = packed_attention_forward(None, *item, None, dropout=1e-12, plan=plan_attention(pieces))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("name", "value"), [("softcap", 30.0), ("s_aux", torch.zeros(2))])
def test_scores_that_are_capped_or_have_sinks_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        packed_attention_forward(None, *states(3, 1, 1), None, plan=plan_attention([Segment(0, 3)]), **{name: value})


def test_values_of_another_width_are_refused() -> None:
    query, key, value = states(3, 1, 1)
    with pytest.raises(ValueError, match="wide"):
        packed_attention_forward(None, query, key, value[..., :8], None, plan=plan_attention([Segment(0, 3)]))


def test_pieces_without_tokens() -> None:
    """A sequence of one token, which is only predicted."""
    for lengths in ([0], [4, 0, 3]):
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        pieces = [Segment(start, length) for start, length in zip(starts, lengths, strict=True)]
        check(pieces, plan_attention(pieces), (4, 2))


def as_spans(pieces: list[Segment], device: str = "cpu") -> AttentionPlan:
    """The plan that a CUDA device gets, here."""
    result = plan_attention(pieces)
    return replace(
        result,
        spans=attention_plan.varlen_spans([piece.indices for piece in pieces], _prefix_positions(pieces), device),
    )


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What the kernel says of itself: causal attention of each sequence, aligned with its last query and key."""
    assert query_starts.dtype == key_starts.dtype == torch.int32
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert most_queries == int(query_starts.diff().max())
    assert most_keys == int(key_starts.diff().max())
    result = []
    for number in range(len(query_starts) - 1):
        q = query[query_starts[number] : query_starts[number + 1]].transpose(0, 1)
        k, v = (item[key_starts[number] : key_starts[number + 1]].transpose(0, 1) for item in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]).bool()
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        result.append(seen.transpose(0, 1))
    return torch.cat(result)


@settings(max_examples=60)
@given(drawn=SHAPES, heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_the_spans_of_a_row_are_masked_attention(drawn: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    """The kernel itself runs on CUDA devices only; what it is given is looked at here."""
    pieces = pieces_of(drawn)
    mask = sees(pieces)
    ours, theirs = states(len(mask), *heads), states(len(mask), *heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", one_by_one)
        patch.setattr(attention, "has_varlen_kernel", lambda query, dropout: True)
        actual, _ = packed_attention_forward(None, *ours, None, scaling=0.3, plan=as_spans(pieces))
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(actual, expected.transpose(1, 2))
    weights = torch.randn(actual.shape, dtype=actual.dtype, generator=torch.Generator().manual_seed(1))
    (actual * weights).sum().backward()
    (expected.transpose(1, 2) * weights).sum().backward()
    for first, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first.grad, other.grad, atol=1e-6, rtol=1e-5)


def test_a_row_of_whole_sequences_is_taken_as_it_is() -> None:
    assert as_spans([Segment(0, 5), Segment(5, 3)]).spans.keys is None
    assert as_spans([Segment(0, 2), Segment(2, 3, 0)]).spans.keys.tolist() == [[0, 1, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_the_kernel_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]) -> None:
    """Its own signature and shapes, forwards and backwards, without a device."""
    pieces = [Segment(0, 5), Segment(5, 3, 0), Segment(8, 7, 0), Segment(15, 2)]
    given = [item.detach().to("meta", torch.bfloat16).requires_grad_() for item in states(17, *heads)]
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, dropout: True)
    result, _ = packed_attention_forward(None, *given, None, plan=as_spans(pieces, "meta"))
    assert result.shape == (1, 17, heads[0], 16)
    result.float().sum().backward()
    assert all(item.grad is not None and item.grad.shape == item.shape for item in given)


def test_what_the_kernel_cannot_do_goes_the_other_way() -> None:
    query = torch.zeros(3, 2, 16)
    assert not attention.has_varlen_kernel(query, 0.0), "it is on the CPU"
    pieces = [Segment(0, 5), Segment(5, 3, 0)]
    actual, _ = packed_attention_forward(None, *states(8, 4, 2), None, plan=as_spans(pieces))
    expected, _ = packed_attention_forward(None, *states(8, 4, 2), None, plan=plan_attention(pieces))
    assert torch.equal(actual, expected)
