"""Attention confined to segments, against torch's attention with an explicit mask."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.models import attention, attention_plan
from posttrain.models.attention import packed_attention_forward
from posttrain.models.attention_plan import AttentionPlan, RowSegment, _prefix_positions, plan_attention_rows

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6)


def segments_of(shapes: list[tuple[int, int]]) -> list[RowSegment]:
    """Consecutive segments; each continues an earlier segment or none."""
    segments: list[RowSegment] = []
    for length, distance in shapes:
        start = segments[-1].start + segments[-1].length if segments else 0
        segments.append(RowSegment(start, length, len(segments) - distance if 0 < distance <= len(segments) else None))
    return segments


def plan_attention(segments: list[RowSegment], *, one_group: bool = False) -> AttentionPlan:
    (plan,) = plan_attention_rows([segments], one_group=one_group)
    return plan


def attention_mask(segments: list[RowSegment]) -> torch.Tensor:
    total = segments[-1].start + segments[-1].length
    mask = torch.zeros(total, total, dtype=torch.bool)
    for segment in segments:
        rows = slice(segment.start, segment.start + segment.length)
        mask[rows, rows] = torch.ones(segment.length, segment.length).tril().bool()
        parent = segment.parent
        while parent is not None:
            ancestor = segments[parent]
            mask[rows, ancestor.start : ancestor.start + ancestor.length] = True
            parent = ancestor.parent
    return mask


def random_states(total: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, total, 16, dtype=torch.float64, generator=generator).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def check(segments: list[RowSegment], plan: AttentionPlan, heads: tuple[int, int], scale: float | None = None) -> None:
    """Values and gradients are those of torch's masked attention."""
    mask = attention_mask(segments)
    packed, reference = random_states(len(mask), *heads), random_states(len(mask), *heads)
    actual, _ = packed_attention_forward(None, *packed, None, scaling=scale, plan=plan)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *reference, attn_mask=mask, scale=scale, enable_gqa=True
    )
    expected = expected.transpose(1, 2)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(actual.shape, dtype=actual.dtype, generator=torch.Generator().manual_seed(1))
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    for first, other in zip(packed, reference, strict=True):
        torch.testing.assert_close(first.grad, other.grad, atol=1e-6, rtol=1e-5)


@settings(max_examples=60)
@given(shapes=SHAPES, heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]), one_group=st.booleans())
@example(shapes=[(5, 0)], heads=(4, 2), one_group=False)  # its queries lie in memory in another order than in the row
def test_packed_attention_is_masked_attention(
    shapes: list[tuple[int, int]], heads: tuple[int, int], one_group: bool
) -> None:
    segments = segments_of(shapes)
    check(segments, plan_attention(segments, one_group=one_group), heads, 0.3)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_sequences_longer_than_a_tile(length: int) -> None:
    segments = [RowSegment(0, length), RowSegment(length, 3, 0)]
    check(segments, plan_attention(segments), (2, 1))


def test_long_sequences_with_prefixes_of_different_lengths() -> None:
    """Tiles whose queries see different numbers of keys."""
    segments = [RowSegment(0, 5), RowSegment(5, 2), RowSegment(7, 300, 0), RowSegment(307, 297, 1)]
    plan = plan_attention(segments)
    assert any(group.hidden is not None and group.queries.shape[1] == 300 for group in plan.groups)
    check(segments, plan, (4, 2))


def test_a_single_mask_is_cached_for_all_lengths() -> None:
    attention._causal_mask.cache_clear()
    for queries in (2, 9, 270):
        for prefix in (0, 1, 30):
            query, keys = torch.randn(1, queries, 3, 4), torch.randn(1, prefix + queries, 4)
            attention.causal_attention(query, keys, keys, 0.5)
    assert attention._causal_mask.cache_info().currsize == 1


def test_the_dropout_kernel_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout uses torch's kernel too; with a negligible rate both paths can be compared."""
    segments = [RowSegment(0, 5), RowSegment(5, 3, 0), RowSegment(8, 7, 0), RowSegment(15, 2)]
    inputs = random_states(17, 4, 2)
    actual, _ = packed_attention_forward(None, *inputs, None, plan=plan_attention(segments))
    kernel, _ = packed_attention_forward(None, *inputs, None, dropout=1e-12, plan=plan_attention(segments))
    torch.testing.assert_close(actual, kernel)


@pytest.mark.parametrize(("name", "value"), [("softcap", 30.0), ("s_aux", torch.zeros(2))])
def test_scores_that_are_capped_or_have_sinks_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        packed_attention_forward(
            None, *random_states(3, 1, 1), None, plan=plan_attention([RowSegment(0, 3)]), **{name: value}
        )


def test_values_of_another_width_are_refused() -> None:
    query, key, value = random_states(3, 1, 1)
    with pytest.raises(ValueError, match="wide"):
        packed_attention_forward(None, query, key, value[..., :8], None, plan=plan_attention([RowSegment(0, 3)]))


def test_segments_without_tokens() -> None:
    """A sequence of one token, which is only predicted."""
    for lengths in ([0], [4, 0, 3]):
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        segments = [RowSegment(start, length) for start, length in zip(starts, lengths, strict=True)]
        check(segments, plan_attention(segments), (4, 2))


def varlen_plan(segments: list[RowSegment], device: str = "cpu") -> AttentionPlan:
    """The plan that a CUDA device would get."""
    result = plan_attention(segments)
    return replace(
        result,
        spans=attention_plan.varlen_spans(
            [segment.indices for segment in segments], _prefix_positions(segments), device
        ),
    )


def reference_kernel(
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
    """The documented behaviour of the kernel: causal attention of each sequence, aligned at its last query and key."""
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
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        result.append(output.transpose(0, 1))
    return torch.cat(result)


@pytest.mark.slow
@settings(max_examples=60)
@given(shapes=SHAPES, heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_varlen_spans_describe_masked_attention(shapes: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    """The kernel runs only on CUDA devices, so this checks its inputs."""
    segments = segments_of(shapes)
    mask = attention_mask(segments)
    packed, reference = random_states(len(mask), *heads), random_states(len(mask), *heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", reference_kernel)
        patch.setattr(attention, "has_varlen_kernel", lambda query, dropout: True)
        actual, _ = packed_attention_forward(None, *packed, None, scaling=0.3, plan=varlen_plan(segments))
    expected = torch.nn.functional.scaled_dot_product_attention(*reference, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(actual, expected.transpose(1, 2))
    weights = torch.randn(actual.shape, dtype=actual.dtype, generator=torch.Generator().manual_seed(1))
    (actual * weights).sum().backward()
    (expected.transpose(1, 2) * weights).sum().backward()
    for first, other in zip(packed, reference, strict=True):
        torch.testing.assert_close(first.grad, other.grad, atol=1e-6, rtol=1e-5)


def test_a_row_of_whole_sequences_needs_no_gather() -> None:
    assert varlen_plan([RowSegment(0, 5), RowSegment(5, 3)]).spans.keys is None
    assert varlen_plan([RowSegment(0, 2), RowSegment(2, 3, 0)]).spans.keys.tolist() == [[0, 1, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_the_kernel_accepts_the_plan(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]) -> None:
    """Checks its signature and shapes, forward and backward, on the meta device."""
    segments = [RowSegment(0, 5), RowSegment(5, 3, 0), RowSegment(8, 7, 0), RowSegment(15, 2)]
    inputs = [item.detach().to("meta", torch.bfloat16).requires_grad_() for item in random_states(17, *heads)]
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, dropout: True)
    result, _ = packed_attention_forward(None, *inputs, None, plan=varlen_plan(segments, "meta"))
    assert result.shape == (1, 17, heads[0], 16)
    result.float().sum().backward()
    assert all(item.grad is not None and item.grad.shape == item.shape for item in inputs)


def test_without_the_kernel_the_plan_still_works() -> None:
    query = torch.zeros(3, 2, 16)
    assert not attention.has_varlen_kernel(query, 0.0), "it is on the CPU"
    segments = [RowSegment(0, 5), RowSegment(5, 3, 0)]
    actual, _ = packed_attention_forward(None, *random_states(8, 4, 2), None, plan=varlen_plan(segments))
    expected, _ = packed_attention_forward(None, *random_states(8, 4, 2), None, plan=plan_attention(segments))
    assert torch.equal(actual, expected)
