"""Models with a classification head: reward models and classifiers on a decoder, and ready-made text classifiers.

They are transformers' own ``...ForSequenceClassification`` models, which read the outputs off the state at the last
token that is no padding."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from posttrain.models.language_model import DTYPES, LanguageModel, load_language_model
from posttrain.models.sources import check_model_folder, check_no_missing_weights, first_line
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, suggest

REWARD = ("reward",)
"""The one output of a reward model."""

_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}

_MAX_WINDOW = 2048

_LENGTH_STEP = 16


def load_classifier(folder: Path, task: TaskConfig, dtype: str, names: Sequence[str]) -> LanguageModel:
    """Load a model with one output a name: as it is where it has them already, else a language model with a new head.

    Args:
        folder: in Hugging Face layout.
        task: what the model is asked to do.
        dtype: as `load` takes it.
        names: of the K outputs.

    Raises:
        UserError: the folder holds no such model, one with other outputs, or one of a family that has no such head.
    """
    check_model_folder(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or []):
        return _load_sequence_classifier(folder, task, dtype, names)
    return _with_head(load_language_model(folder, task, dtype), names, folder)


def class_logits(lm: LanguageModel, states: Tensor) -> Tensor:
    """float32 [N, K], the outputs for hidden states [N, D]."""
    logits: Tensor = lm.model.score(states)
    return logits.float()


def output_names(lm: LanguageModel) -> list[str]:
    """The names of the K outputs."""
    names = lm.model.config.id2label
    return [names[index] for index in sorted(names)]


def padding_token(lm: LanguageModel) -> int | None:
    """Returns the token that transformers takes for padding when it looks for a text's last token."""
    token: int | None = lm.model.config.get_text_config().pad_token_id
    return token


def _load_sequence_classifier(folder: Path, task: TaskConfig, dtype: str, names: Sequence[str]) -> LanguageModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=DTYPES[dtype], use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"no model for sequences: {first_line(error)}", where=str(folder)) from None
    model, loading = loaded
    check_no_missing_weights(loading, folder)
    model.generation_config = GenerationConfig.from_model_config(model.config)  # where stop tokens are looked for
    lm = LanguageModel(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer, task)
    if output_names(lm) != list(names):
        what = f"has the outputs {', '.join(output_names(lm)[:5])}, and {', '.join(names[:5])} are wanted"
        raise UserError(what, where=str(folder))
    return lm


def _with_head(lm: LanguageModel, names: Sequence[str], folder: Path) -> LanguageModel:
    """The language model's decoder under a new head, whose weights are drawn as transformers draws them."""
    from transformers import AutoModelForSequenceClassification

    config: Any = lm.model.config
    if config.get_text_config().pad_token_id is None:
        if lm.tokenizer.pad_token is None:
            lm.tokenizer.pad_token = lm.tokenizer.eos_token
        config.get_text_config().pad_token_id = lm.tokenizer.pad_token_id
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    try:
        with torch.device("meta"):  # all but the head is there already
            model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise UserError(f"no model for sequences: {first_line(error)}", where=str(folder)) from None
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise UserError(f"models of type {config.model_type} have no head for sequences", where=str(folder))
    weight = lm.model.get_output_embeddings().weight
    head = nn.Linear(model.score.in_features, len(names), bias=False, device=weight.device, dtype=weight.dtype)
    nn.init.normal_(head.weight, std=getattr(config.get_text_config(), "initializer_range", 0.02))
    model.score = head
    setattr(model, model.base_model_prefix, lm.model.base_model)
    model.config = config  # the decoder's own, so that its attention is switched in one place
    model.generation_config = lm.model.generation_config
    return LanguageModel(model.eval(), lm.tokenizer, lm.task)


@dataclass(frozen=True)
class SequenceClassifier:
    """A model with its tokenizer.

    Attributes:
        model: transformers' model, in float32.
        window: tokens that it reads at once, special ones among them.
    """

    model: Any
    tokenizer: Any
    window: int

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a model in Hugging Face layout.

        Raises:
            UserError: the folder holds no classifier of sequences, or weights of it are missing.
        """
        from safetensors import SafetensorError
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        check_model_folder(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(f"no classifier of sequences: {first_line(error)}", where=str(folder)) from None
        model, loading = loaded
        check_no_missing_weights(loading, folder)
        config = model.config.get_text_config()
        if config.pad_token_id is None:
            raise UserError("its config names no pad_token_id", where=str(folder), fix="add it to config.json")
        limits = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
        window = min(int(limit) for limit in limits if limit)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.to(device).eval(), tokenizer, min(window, _MAX_WINDOW))

    @property
    def labels(self) -> list[str]:
        """The names of the K outputs."""
        names = self.model.config.id2label
        return [names[index] for index in sorted(names)]

    @property
    def exclusive(self) -> bool:
        """Whether a text has exactly one of the labels rather than any number of them."""
        return self.model.config.problem_type != "multi_label_classification" and len(self.labels) > 1

    def places(self, labels: Sequence[str], where: str) -> list[int]:
        """Which outputs the labels name.

        Raises:
            UserError: there is no such label.
        """
        names = self.labels
        for label in labels:
            if label not in names:
                what = f"the classifier has no label `{label}`; its labels are {', '.join(names)}"
                raise UserError(what, where=where, fix=suggest(label, names))
        return [names.index(label) for label in labels]

    @torch.inference_mode()
    def probabilities(self, texts: Sequence[str], outputs: Sequence[int]) -> npt.NDArray[np.float64]:
        """Probability of the outputs at ``places``, float64 [N]; of a text longer than the window that of any window.

        Of labels that exclude each other the probabilities are added up, of others the highest counts. A text's number
        does not hang on the texts beside it: a batch's shape depends on length alone, and it is filled up.
        """
        highest = np.zeros(len(texts))
        pieces: dict[int, list[tuple[int, list[int]]]] = {}
        for row, ids in self._windows(texts):
            pieces.setdefault(min(-(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP, self.window), []).append((row, ids))
        for length, waiting in sorted(pieces.items()):
            size = max(1, _BATCH_TOKENS[self.model.device.type] // length)
            for start in range(0, len(waiting), size):
                batch = waiting[start : start + size]
                logits = self._logits([ids for _, ids in batch], size, length)
                chosen = (logits.softmax(-1) if self.exclusive else logits.sigmoid())[:, list(outputs)]
                values = chosen.sum(-1) if self.exclusive else chosen.amax(-1)
                for (row, _), value in zip(batch, values.tolist(), strict=False):
                    highest[row] = max(highest[row], value)
        return highest

    def _windows(self, texts: Sequence[str]) -> Iterator[tuple[int, list[int]]]:
        if not len(texts):
            return
        encoded = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.window,
            return_overflowing_tokens=True,
            return_attention_mask=False,
        )
        for row, ids in zip(encoded["overflow_to_sample_mapping"], encoded["input_ids"], strict=True):
            yield int(row), ids or [self.model.config.get_text_config().pad_token_id]

    def _logits(self, batch: Sequence[list[int]], size: int, length: int) -> torch.Tensor:
        """float64 [size, K]; rows behind those of the batch mean nothing."""
        ids = torch.full((size, length), self.model.config.get_text_config().pad_token_id, dtype=torch.long)
        mask = torch.zeros((size, length), dtype=torch.long)
        mask[:, 0] = 1  # attention over nothing has no value
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            mask[row, : len(tokens)] = 1
        device = self.model.device
        logits: torch.Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits.double()
