"""Makes a tiny Llama with a byte-level tokenizer, offline in a moment: a real model for tests and for ``--quick``."""

from pathlib import Path
from typing import Any

_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def byte_tokenizer() -> Any:
    """Returns a tokenizer with one token per byte and per special mark; it is lossless and needs no training."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in _SPECIAL])
    wrap: Any = PreTrainedTokenizerFast
    fast = wrap(tokenizer_object=tokenizer, pad_token=_SPECIAL[0], eos_token=_SPECIAL[1])
    fast.chat_template = _TEMPLATE
    return fast


def write_tiny_model(folder: Path, seed: int = 0, width: int = 96, layers: int = 2) -> Path:
    """Writes a randomly initialised Llama (about 300,000 parameters at the defaults) in Hugging Face layout.

    Args:
        folder: the output folder; made if missing.
        seed: seed of the initial weights.
        width: hidden size; a multiple of 32.
        layers: number of decoder layers.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        # Wider than Llama's 0.02, which at this width would start the residual stream close to nothing.
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers must not depend on this model
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
