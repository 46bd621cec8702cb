"""Is the GPU kernel's attention over a packed row masked attention? The largest differences, output and gradients.

    python benchmarks/gpu_attention.py

Compared with PyTorch's own attention under a mask in float32, for rows of sequences that share their beginnings. Ends
with exit code 1 where a difference is beyond bfloat16's, and 2 where there is no CUDA device.
"""

import sys

import torch

from posttrain.models.attention import packed_attention_forward
from posttrain.models.attention_plan import Segment, plan_attention

PIECES = [Segment(0, 40), Segment(40, 300, 0), Segment(340, 7, 0), Segment(347, 129), Segment(476, 1, 3)]
NEAR = 5e-2


def mask() -> torch.Tensor:
    """bool [T, T]: who sees whom in the row."""
    total = PIECES[-1].start + PIECES[-1].length
    seen = torch.zeros(total, total, dtype=torch.bool)
    for piece in PIECES:
        own = slice(piece.start, piece.start + piece.length)
        seen[own, own] = torch.ones(piece.length, piece.length).tril().bool()
        if piece.parent is not None:
            before = PIECES[piece.parent]
            seen[own, before.start : before.start + before.length] = True
    return seen.cuda()


def largest_difference(heads: int, shared: int) -> float:
    """Of output and gradients, as a share of the largest number in each."""
    seen, generator = mask(), torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, count, len(seen), 64, generator=generator) for count in (heads, shared, shared)]
    ours, theirs = (
        [one.to("cuda", dtype).requires_grad_() for one in drawn] for dtype in (torch.bfloat16, torch.float32)
    )
    found, _ = packed_attention_forward(None, *ours, None, plan=plan_attention(PIECES, "cuda"))
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, attn_mask=seen, enable_gqa=True).transpose(
        1, 2
    )
    found.float().square().sum().backward()
    expected.square().sum().backward()
    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))]
    return max(float((one.float() - other).abs().max() / other.abs().max()) for one, other in pairs)


def main() -> None:
    """Compare, for several numbers of heads."""
    if not torch.cuda.is_available():
        print("gpu_attention: there is no CUDA device here", file=sys.stderr)
        raise SystemExit(2)
    print(torch.cuda.get_device_name())
    apart = {(heads, shared): largest_difference(heads, shared) for heads, shared in ((9, 3), (4, 4), (8, 1))}
    for (heads, shared), difference in apart.items():
        print(f"{heads} heads, {shared} of keys: {difference:.1e}")
    raise SystemExit(int(max(apart.values()) > NEAR))


if __name__ == "__main__":
    main()
