"""Sentence embeddings by an encoder in sentence-transformers' or plain Hugging Face layout.

Computes the same as sentence-transformers with transformers alone (Reimers and Gurevych, "Sentence-BERT", EMNLP 2019):
token states are pooled over the attention mask and scaled to length one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.models.embedder_source import embedder_key, find_embedder
from posttrain.models.loading import load_tokenizer, load_weights
from posttrain.store.errors import UserError

_LENGTH_STEP = 16  # batches' lengths are multiples of it, which makes few shapes
# Families that number positions from the padding token's number on (fairseq's convention).
_POSITIONS_BEHIND_PADDING = {"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"}
_SUPPORTED_MODULES = {"Transformer", "Pooling", "Normalize"}


@dataclass(frozen=True)
class Pooling:
    """Settings for truncating texts and pooling their token states to one vector.

    Attributes:
        mode: the mean of the states under the attention mask, or the first token's state.
        max_length: most tokens of a text, special ones included; the rest is cut off.
        lower_case: whether texts are lower-cased before they are split into tokens.
        prompt: prefix of each text.
    """

    mode: Literal["mean", "cls"]
    max_length: int
    lower_case: bool = False
    prompt: str = ""


@dataclass(frozen=True)
class Embedder:
    """An encoder with its tokenizer, ready to embed.

    Attributes:
        model: transformers' encoder, in float32.
        key: hash of the weights and settings, 64 hex characters.
    """

    model: Any
    tokenizer: Any
    pooling: Pooling
    key: str

    @classmethod
    def load(cls, name: str) -> Self:
        """Loads an embedder.

        Args:
            name: see `find_embedder`.

        Raises:
            UserError: there is no such model, or it needs a module that is not supported.
        """
        from transformers import AutoModel

        folder = find_embedder(name)
        tokenizer = load_tokenizer(str(folder), "no encoder")
        # BERT's pooler on top is not used, and many checkpoints come without its weights. Others come with the heads
        # that they were trained with, which have no layers.
        model = load_weights(
            AutoModel, folder, torch.float32, "no encoder", unused=r"^(?!.*\.\d+\.)", optional="pooler"
        )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.to(device).eval(), tokenizer, _pooling(folder, tokenizer, model.config), embedder_key(name))

    @property
    def width(self) -> int:
        """D, the size of an embedding."""
        return int(self.model.config.hidden_size)

    @torch.no_grad()
    def embed(self, texts: Sequence[str], tokens: int = 512) -> npt.NDArray[np.float32]:
        """Computes embeddings of length one, float32 [N, D].

        Args:
            tokens: the most tokens of a batch, padding included.
        """
        ids = self._token_ids(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        rounded = np.minimum(-(-np.maximum(lengths, 1) // _LENGTH_STEP) * _LENGTH_STEP, self.pooling.max_length)
        embeddings = np.zeros((len(ids), self.width), dtype=np.float32)
        for length in np.unique(rounded).tolist():
            rows = np.flatnonzero(rounded == length)
            size = max(1, tokens // length)
            for start in range(0, len(rows), size):
                # A batch's shape depends on the rounded length alone, and one that is not full is filled up: another
                # shape may choose another kernel, and a text's numbers would depend on the texts beside it.
                batch = rows[start : start + size]
                states = self._pooled([ids[row] for row in batch.tolist()], size, length)
                embeddings[batch] = states[: len(batch)].cpu().numpy()
        return embeddings

    def _token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        if not len(texts):
            return []
        read = [self.pooling.prompt + (text.lower() if self.pooling.lower_case else text) for text in texts]
        encoded = self.tokenizer(read, truncation=True, max_length=self.pooling.max_length, return_attention_mask=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _pooled(self, batch: list[list[int]], size: int, length: int) -> Tensor:
        """Returns the pooled vectors, float32 [size, D]; rows behind those of the batch are padding."""
        padding = self.tokenizer.pad_token_id or 0
        ids = torch.full((size, length), padding, dtype=torch.long)
        mask = torch.zeros((size, length), dtype=torch.long)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            mask[row, : len(tokens)] = 1
        mask[len(batch) :, 0] = 1  # attention to no position is undefined, NaN in some kernels
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        if self.pooling.mode == "cls":
            pooled = states[:, 0]
        else:
            weights = mask.unsqueeze(-1).float()
            pooled = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        normal: Tensor = torch.nn.functional.normalize(pooled, dim=-1)
        return normal


def _pooling(folder: Path, tokenizer: Any, config: Any) -> Pooling:
    """Reads the pooling from the folder's files; a plain encoder is pooled by its mean, as in sentence-transformers."""
    mode: Literal["mean", "cls"] = "mean"
    with_prompt = True
    modules = _read_json(folder / "modules.json") or []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _SUPPORTED_MODULES:
            raise UserError(f"has a module `{kind}`, which is not supported", where=str(folder / "modules.json"))
        if kind == "Pooling":
            file = folder / str(module["path"]) / "config.json"
            mode = _pooling_mode(file)
            with_prompt = (_read_json(file) or {}).get("include_prompt", True)
    settings = _read_json(folder / "sentence_bert_config.json") or {}
    positions = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in _POSITIONS_BEHIND_PADDING:
        positions -= 2  # the padding token's number, 1, and 0 are never a token's position
    limits = [settings.get("max_seq_length"), positions]
    length = min([int(limit) for limit in [*limits, tokenizer.model_max_length] if limit])
    prompts = _read_json(folder / "config_sentence_transformers.json") or {}
    prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name"), "")
    if prompt and not with_prompt:
        raise UserError("excludes the prompt from the pooling, which is not supported", where=str(folder))
    return Pooling(mode, length, bool(settings.get("do_lower_case")), prompt)


def _pooling_mode(file: Path) -> Literal["mean", "cls"]:
    values = _read_json(file) or {}
    value = values.get("pooling_mode")  # newer configs name the mode, older ones have a flag for each
    modes = [value] if isinstance(value, str) else [key for key, on in values.items() if key.startswith("pool") and on]
    if modes in (["mean"], ["pooling_mode_mean_tokens"]):
        return "mean"
    if modes in (["cls"], ["pooling_mode_cls_token"]):
        return "cls"
    raise UserError(f"pools by {', '.join(modes) or 'nothing'}; mean and cls are supported", where=str(file))


def _read_json(file: Path) -> Any:
    """Returns a JSON file's content; None if there is no such file."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError("cannot be read as JSON", where=str(file)) from None
