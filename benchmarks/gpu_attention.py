"""Compares the GPU kernel's attention over a packed row with masked attention: the output and the gradients.

    python benchmarks/gpu_attention.py

The reference is PyTorch's own attention under a mask in float32; the row's sequences share prefixes. The exit code is 1
if a difference exceeds bfloat16's rounding, and 2 if there is no CUDA device.
"""

import sys

import torch

from posttrain.models.attention import packed_attention_forward
from posttrain.models.attention_plan import RowSegment, plan_attention_rows

SEGMENTS = [
    RowSegment(0, 40),
    RowSegment(40, 300, 0),
    RowSegment(340, 7, 0),
    RowSegment(347, 129),
    RowSegment(476, 1, 3),
]
TOLERANCE = 5e-2


def mask() -> torch.Tensor:
    """Return the attention mask of the row, bool [T, T]: the tokens that each token attends to."""
    total = SEGMENTS[-1].start + SEGMENTS[-1].length
    attention_mask = torch.zeros(total, total, dtype=torch.bool)
    for segment in SEGMENTS:
        span = slice(segment.start, segment.start + segment.length)
        attention_mask[span, span] = torch.ones(segment.length, segment.length).tril().bool()
        if segment.parent is not None:
            prefix = SEGMENTS[segment.parent]
            attention_mask[span, prefix.start : prefix.start + prefix.length] = True
    return attention_mask.cuda()


def largest_difference(heads: int, kv_heads: int) -> float:
    """Return the largest difference of output and gradients, as a share of the largest number in each."""
    attention_mask, generator = mask(), torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, count, len(attention_mask), 64, generator=generator) for count in (heads, kv_heads, kv_heads)]
    inputs, reference_inputs = (
        [tensor.to("cuda", dtype).requires_grad_() for tensor in qkv] for dtype in (torch.bfloat16, torch.float32)
    )
    (plan,) = plan_attention_rows([SEGMENTS], "cuda")
    output, _ = packed_attention_forward(None, *inputs, None, plan=plan)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *reference_inputs, attn_mask=attention_mask, enable_gqa=True
    ).transpose(1, 2)
    output.float().square().sum().backward()
    expected.square().sum().backward()
    gradients = ((ours.grad, reference.grad) for ours, reference in zip(inputs, reference_inputs, strict=True))
    pairs = [(output, expected), *gradients]
    return max(float((ours.float() - reference).abs().max() / reference.abs().max()) for ours, reference in pairs)


def main() -> None:
    """Compare several numbers of heads."""
    if not torch.cuda.is_available():
        print("gpu_attention: this machine has no CUDA device", file=sys.stderr)
        raise SystemExit(2)
    print(torch.cuda.get_device_name())
    differences = {counts: largest_difference(*counts) for counts in ((9, 3), (4, 4), (8, 1))}
    for (heads, kv_heads), difference in differences.items():
        print(f"{heads} heads, {kv_heads} of keys: {difference:.1e}")
    raise SystemExit(int(max(differences.values()) > TOLERANCE))


if __name__ == "__main__":
    main()
