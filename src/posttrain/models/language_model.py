"""A causal language model with its tokenizer and task."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.chat import ChatTemplate, TokenizedExample, keeping_prompt
from posttrain.models.loading import check_loadable, load_tokenizer, load_weights, not_finite
from posttrain.models.sources import check_model_folder
from posttrain.models.task import TaskConfig, Turns
from posttrain.store.errors import UserError, WorkError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}

# ChatML for base models whose tokenizer brings no template. Turns end with the stop token that the tokenizer knows:
# an ``<|im_end|>`` that is not a token of its own would be part of every answer.
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class LanguageModel:
    """A transformers causal language model, its tokenizer and its task."""

    model: Any
    tokenizer: Any
    task: TaskConfig
    chat: ChatTemplate = field(init=False)
    decoder: nn.Module = field(init=False)
    """The model without its output head; returns hidden states."""
    compiled: bool = field(default=False, init=False)
    """True once torch.compile compiles the layers; then the functions of the logits are compiled, too."""

    def __post_init__(self) -> None:
        stops = stop_tokens(self.model, self.tokenizer)
        if not stops:
            raise UserError("neither the tokenizer nor generation_config.json names a stop token", where="model")
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = _CHATML
        self.chat = ChatTemplate(self.tokenizer, frozenset(stops))
        # Models of transformers' older families have no `get_decoder`; their base model is the decoder.
        self.decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.base_model

    def prompt_ids(self, prompt: Turns) -> list[int]:
        """Token ids of a record's prompt as the model is shown it."""
        with keeping_prompt(prompt):
            return self.chat.prompt_ids(self.task.turns(prompt))

    def answer_ids(self, answer: str) -> list[int]:
        """Token ids of an answer with its stop token."""
        return self.chat.answer_ids(answer)

    def encode(self, prompt: Turns, answer: str) -> TokenizedExample:
        """A training example: prompt and answer with the mask of supervised tokens."""
        with keeping_prompt(prompt):
            return self.chat.encode(self.task.turns(prompt), answer)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] in float32 of hidden states [..., width], as the model's own head gives them."""
        config = self.model.config.get_text_config()
        logits: Tensor = self.model.get_output_embeddings()(hidden).float()
        if scale := getattr(config, "logit_scale", None):  # Cohere multiplies
            logits = logits * scale
        if scale := getattr(config, "logits_scaling", None):  # Granite divides
            logits = logits / scale
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
            logits = cap * torch.tanh(logits / cap)
        return logits


def stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Ids of the tokens that end an answer: the generation config's and the tokenizer's."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = set(eos) if isinstance(eos, list) else {eos}
    ids.add(tokenizer.eos_token_id)
    return {token for token in ids if token is not None}


def load_language_model(folder: Path, task: TaskConfig, dtype: str = "bfloat16") -> LanguageModel:
    """Loads a model in Hugging Face layout.

    Args:
        folder: a local folder with ``config.json``, safetensors weights and a tokenizer.
        task: task of the model.
        dtype: one of ``bfloat16``, ``float32``, ``float16``.

    Raises:
        UserError: if the folder holds no causal language model.
        WorkError: if memory ran out.
    """
    from transformers import AutoModelForCausalLM

    check_model_folder(folder)
    what = "no causal language model"
    tokenizer = load_tokenizer(str(folder), what)
    model = load_weights(AutoModelForCausalLM, folder, DTYPES[dtype], what)
    # After the checks, so that a wrong model costs no memory of the accelerator.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = LanguageModel(model.to(device).eval(), tokenizer, task)
    check_head(loaded, folder)
    return loaded


def load_transformers(folder: Path) -> tuple[Any, Any]:
    """Loads a model in Hugging Face layout as transformers' own objects, ready to generate.

    Args:
        folder: a folder with ``config.json``, safetensors weights and a tokenizer.

    Returns:
        The model (``AutoModelForCausalLM``, or ``AutoModelForSequenceClassification`` for a reward model or a
        classifier) in its stored dtype, in evaluation mode, on the GPU if there is one; and the tokenizer.

    Raises:
        UserError: the folder holds no such model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    check_model_folder(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    classifies = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or [])
    kind = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    tokenizer = load_tokenizer(str(folder))
    dtype = DTYPES.get(config.get("dtype") or config.get("torch_dtype"), torch.float32)
    model = load_weights(kind, folder, dtype, "no model")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


@torch.no_grad()
def check_head(lm: LanguageModel, folder: Path) -> None:
    """Raises a UserError if ``logits`` is not what the model's own forward gives, as its family has another head."""
    # Any token will do: a head that scales, caps or biases does so for all of them.
    ids = torch.tensor([[min(lm.chat.stop_ids)] * 2], device=lm.device)
    own = lm.model(input_ids=ids).logits.float()
    ours = lm.logits(lm.decoder(input_ids=ids).last_hidden_state)
    # Wide enough for bfloat16, far too narrow for a scale or a cap that is not applied.
    if (own - ours).abs().max() > 0.05 * own.abs().max().clamp(min=1):
        raise UserError(f"models of type {lm.model.config.model_type} are not supported", where=str(folder))


def save_language_model(model: LanguageModel, folder: Path, dtype: str = "bfloat16") -> None:
    """Writes the model in Hugging Face layout, weights as safetensors in ``dtype``.

    Raises:
        WorkError: a weight is NaN or infinite; nothing is written.
        UserError: the folder could not be loaded again, as the weights are not those of the config.
    """
    model.model.to(DTYPES[dtype])
    # After the rounding, as it overflows in float16.
    if name := not_finite(model.model):
        raise WorkError(f"the model is not saved: tensor {name} holds NaN or infinite numbers")
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    check_loadable(folder)


def has_full_attention(lm: LanguageModel, tokens: int) -> bool:
    """Returns whether every layer attends to all of ``tokens`` tokens and takes explicit positions."""
    config = lm.model.config
    # Their position biases are computed from the row, and packed positions would be ignored.
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return False
    windows = (getattr(layer, "sliding_window", tokens) for layer in _cache_layers(lm))
    return has_kv_cache_only(lm) and all(window >= tokens for window in windows)


def has_kv_cache_only(lm: LanguageModel) -> bool:
    """Returns whether all layers cache nothing but keys and values, windowed or not."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in _cache_layers(lm))


def _cache_layers(lm: LanguageModel) -> list[Any]:
    from transformers import DynamicCache

    return list(DynamicCache(config=lm.model.config).layers)
