"""Small models and tokenizers in the shapes of well-known families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig

CORPUS = [
    "The capital of France is Paris.\n\nThe capital of Italy is Rome.\n",
    "What is two and two?\nIt is four.\n\nAnd three and three? It is six. user assistant system model",
]

MakeTokenizer = Callable[..., Any]


def _train(tokenizer: Tokenizer, alphabet: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=480, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def _byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _train(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def _sentencepiece() -> Tokenizer:
    """As Llama 2, Mistral and Phi-3 have it: a space is prepended to every piece of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    # Merges are learnt within words; nothing splits the text afterwards.
    splits = pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splits))
    _train(tokenizer, sorted({*"▁\n", *"".join(CORPUS)}))
    tokenizer.pre_tokenizer = None
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """``make_tokenizer(template, eos, *special tokens, sentencepiece=False)``: a tokenizer with its own merges."""
    from transformers import PreTrainedTokenizerFast

    def make(template: str | None, eos: str, *special: str, sentencepiece: bool = False, bos: str = "<s>") -> Any:
        inner = _sentencepiece() if sentencepiece else _byte_level()
        inner.add_special_tokens([AddedToken(mark, special=True) for mark in (bos, eos, *special)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, bos_token=bos)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> LanguageModel:
    """The tiny model in float32."""
    return load_language_model(tiny_model, TaskConfig(max_new_tokens=8), "float32")


ANSWERS = {"hi": "ax a", "my card is gone": "by b", "where?": "cz c", "": "du d", "hi there": "ev e", "my card": "fw f"}


@pytest.fixture(scope="session")
def trained_model(tiny_model: Path) -> tuple[LanguageModel, dict[str, str]]:
    """The tiny model after a few steps of plain gradient descent, and the answers by prompt that it has learnt."""
    lm = load_language_model(tiny_model, TaskConfig(max_new_tokens=8), "float32")
    examples = [lm.encode([{"role": "user", "content": prompt}], answer) for prompt, answer in ANSWERS.items()]
    optimizer = torch.optim.Adam(lm.model.parameters(), lr=3e-3)
    for _ in range(30):
        for example in examples:
            ids = torch.tensor([example.ids])
            targets = ids.where(torch.tensor([example.supervised]), -100)
            lm.model(input_ids=ids, labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return lm, ANSWERS


@pytest.fixture(scope="session")
def real(smollm2: Path) -> LanguageModel:
    """SmolLM2-135M-Instruct in float32."""
    return load_language_model(smollm2, TaskConfig(max_new_tokens=12), "float32")


@pytest.fixture(scope="session")
def family(tiny: LanguageModel) -> Callable[..., LanguageModel]:
    """``family("gemma2", sliding_window=8)``: a randomly initialised model of that family with the tiny tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(kind: str, **settings: Any) -> LanguageModel:
        common = {
            "vocab_size": len(tiny.tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "pad_token_id": tiny.tokenizer.pad_token_id,
            "eos_token_id": tiny.tokenizer.eos_token_id,
            "bos_token_id": None,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(common | settings)))
            # Wide enough that caps, scales and windows matter.
            for weight in model.parameters():
                if weight.ndim >= 2:
                    torch.nn.init.normal_(weight, std=0.15)
        return LanguageModel(model.float().eval(), tiny.tokenizer, tiny.task)

    return make
