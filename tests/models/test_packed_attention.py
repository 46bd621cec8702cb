"""Attention confined to pieces, against torch's own with a mask of who sees whom."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.models.attention import Piece, attend, plan

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6)


def pieces_of(drawn: list[tuple[int, int]]) -> list[Piece]:
    """Pieces one after another; each goes on from an earlier one or from none."""
    pieces: list[Piece] = []
    for length, back in drawn:
        start = pieces[-1].start + pieces[-1].length if pieces else 0
        pieces.append(Piece(start, length, len(pieces) - back if 0 < back <= len(pieces) else None))
    return pieces


def sees(pieces: list[Piece]) -> torch.Tensor:
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


@settings(max_examples=60)
@given(drawn=SHAPES, heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]), one_group=st.booleans())
def test_it_is_masked_attention(drawn: list[tuple[int, int]], heads: tuple[int, int], one_group: bool) -> None:
    pieces = pieces_of(drawn)
    mask = sees(pieces)
    ours, theirs = states(len(mask), *heads), states(len(mask), *heads)
    found, _ = attend(None, *ours, None, scaling=0.3, pieces=plan(pieces, one_group=one_group))
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, attn_mask=mask, scale=0.3, enable_gqa=True)
    expected = expected.transpose(1, 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_sequences_longer_than_a_tile(length: int) -> None:
    pieces = [Piece(0, length), Piece(length, 3, 0)]
    ours, theirs = states(length + 3, 2, 1), states(length + 3, 2, 1)
    found, _ = attend(None, *ours, None, pieces=plan(pieces))
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, attn_mask=sees(pieces), enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)


def test_the_way_of_accelerators_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout takes torch's kernel too; with next to none of it both ways can be compared."""
    pieces = [Piece(0, 5), Piece(5, 3, 0), Piece(8, 7, 0), Piece(15, 2)]
    one = states(17, 4, 2)
    ours, _ = attend(None, *one, None, pieces=plan(pieces))
    theirs, _ = attend(None, *one, None, dropout=1e-12, pieces=plan(pieces))
    torch.testing.assert_close(ours, theirs)


def test_capped_scores_are_refused() -> None:
    with pytest.raises(NotImplementedError):
        attend(None, *states(3, 1, 1), None, softcap=30.0, pieces=plan([Piece(0, 3)]))
