"""The FLOPs of a training against hand-computed numbers, torch's own count and a fake clock."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from posttrain.train.monitor.meter import DecoderSize, mfu, training_flops

LLAMA = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def read_config(values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**values)


def test_the_flops_of_a_tiny_llama_by_hand() -> None:
    """A head is 4 wide. A layer: queries and output 2 * 64, keys and values 2 * 32, feed-forward 3 * 128; makes 576."""
    decoder = DecoderSize.from_config(read_config(LLAMA))
    assert decoder == DecoderSize(matrices=1152, head=256, attention=16)
    # Sequences of 3 and 2 tokens have 6 and 3 pairs; 2 tokens are supervised.
    assert training_flops(decoder, 5, 9, 2) == 6 * (5 * 1152 + 2 * 256) + 12 * 16 * 9 == 39360
    assert training_flops(decoder, 5, 9, 2, weights_frozen=True) == 4 * 6272 + 1728
    assert training_flops(decoder, 0, 0, 0) == 0
    assert mfu(39360, seconds=2.0, peak=39360) == 0.5


@pytest.mark.parametrize(("classifier", "outputs"), [(False, 32), (True, 3)])
def test_a_classifiers_head_has_one_output_per_label(classifier: bool, outputs: int) -> None:
    decoder = DecoderSize.from_config(read_config(LLAMA | {"num_labels": 3}), classifier=classifier)
    assert decoder is not None
    assert decoder.head == 8 * outputs


@pytest.mark.parametrize(
    "values",
    [
        LLAMA | {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
                 "num_attention_heads": 4, "num_key_value_heads": 2},
        LLAMA | {"model_type": "qwen3", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        {"model_type": "gpt2", "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
    ],
    ids=lambda values: values["model_type"],
)  # fmt: skip
def test_the_flops_are_those_that_torch_counts(values: dict[str, Any]) -> None:
    """Torch counts every logit and, in plain attention, the pairs that causality hides as well."""
    from transformers import AutoModelForCausalLM

    length, config = 24, read_config(values)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    decoder = DecoderSize.from_config(config)
    assert decoder is not None
    result = training_flops(decoder, length, length * length, length)
    assert counter.get_total_flops() == pytest.approx(result, rel=1e-3)


def test_an_unknown_architecture_has_no_flops() -> None:
    from transformers import MixtralConfig, PreTrainedConfig

    for config in (MixtralConfig(), SimpleNamespace(hidden_size=8), PreTrainedConfig()):
        assert DecoderSize.from_config(config) is None


def test_the_monitor_imports_no_torch() -> None:
    modules = ("monitor", "decisions", "meter", "metrics", "sinks")
    imports = "; ".join(f"import posttrain.train.monitor.{module}" for module in modules)
    check = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
