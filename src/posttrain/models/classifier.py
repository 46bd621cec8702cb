"""Models with a classification head: reward models and classifiers on a decoder, and ready-made text classifiers.

They are transformers' own ``...ForSequenceClassification`` models, which compute the outputs from the state of the last
token that is not padding.
"""

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
from posttrain.models.loading import first_line, load_tokenizer, load_weights
from posttrain.models.sources import check_model_folder
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, suggest

REWARD = ("reward",)
"""The one output of a reward model."""

_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}

_MAX_WINDOW = 2048

_LENGTH_STEP = 16


def load_classifier(folder: Path, task: TaskConfig, dtype: str, names: Sequence[str]) -> LanguageModel:
    """Loads a model with one output per name; a language model gets a new head.

    Args:
        folder: model in Hugging Face layout.
        task: the model's task.
        dtype: see `load_language_model`.
        names: names of the K outputs.

    Raises:
        UserError: the folder holds no such model, one with other outputs, or one of a family that has no such head.
    """
    check_model_folder(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or []):
        return _load_sequence_classifier(folder, task, dtype, names)
    return _with_head(load_language_model(folder, task, dtype), names, folder)


def class_logits(lm: LanguageModel, states: Tensor) -> Tensor:
    """Returns the outputs for hidden states [N, D], float32 [N, K]."""
    logits: Tensor = lm.model.score(states)
    return logits.float()


def output_names(lm: LanguageModel) -> list[str]:
    """Returns the names of the K outputs."""
    names = lm.model.config.id2label
    return [names[index] for index in sorted(names)]


def padding_token(lm: LanguageModel) -> int | None:
    """Returns the token that transformers treats as padding when it looks for a text's last token."""
    token: int | None = lm.model.config.get_text_config().pad_token_id
    return token


def _load_sequence_classifier(folder: Path, task: TaskConfig, dtype: str, names: Sequence[str]) -> LanguageModel:
    from transformers import AutoModelForSequenceClassification, GenerationConfig

    what = "no model for sequences"
    tokenizer = load_tokenizer(str(folder), what)
    model = load_weights(AutoModelForSequenceClassification, folder, DTYPES[dtype], what)
    model.generation_config = GenerationConfig.from_model_config(model.config)  # `LanguageModel` reads stop tokens here
    lm = LanguageModel(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer, task)
    if output_names(lm) != list(names):
        what = f"has the outputs {', '.join(output_names(lm)[:5])} instead of {', '.join(names[:5])}"
        raise UserError(what, where=str(folder))
    return lm


def _with_head(lm: LanguageModel, names: Sequence[str], folder: Path) -> LanguageModel:
    """Returns the language model's decoder with a new head, initialised as transformers would."""
    from transformers import AutoModelForSequenceClassification

    config: Any = lm.model.config
    # Without a padding token transformers cannot find a text's last token, and refuses batches.
    if config.get_text_config().pad_token_id is None:
        if lm.tokenizer.pad_token is None:
            lm.tokenizer.pad_token = lm.tokenizer.eos_token
        config.get_text_config().pad_token_id = lm.tokenizer.pad_token_id
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    try:
        with torch.device("meta"):  # the decoder's weights exist already; a second copy could exceed the memory
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
    """A ready-made text classifier with its tokenizer.

    Attributes:
        model: transformers' model, in float32.
        window: most tokens of an input, special ones included.
    """

    model: Any
    tokenizer: Any
    window: int

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Loads a model in Hugging Face layout.

        Raises:
            UserError: the folder holds no sequence classifier, or its weights are incomplete.
        """
        from transformers import AutoModelForSequenceClassification

        check_model_folder(folder)
        what = "no classifier of sequences"
        tokenizer = load_tokenizer(str(folder), what)
        model = load_weights(AutoModelForSequenceClassification, folder, torch.float32, what)
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
        """True if a text has exactly one of the labels, False if it has any number of them."""
        return self.model.config.problem_type != "multi_label_classification" and len(self.labels) > 1

    def label_indices(self, labels: Sequence[str], where: str) -> list[int]:
        """Returns the indices of the labels' outputs.

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
        """Returns the probability that a text has one of the labels at the indices ``outputs``, float64 [N].

        Probabilities of exclusive labels are added up; of others the highest counts, as it does of the windows of a
        long text.
        """
        highest = np.zeros(len(texts))
        pieces: dict[int, list[tuple[int, list[int]]]] = {}
        for row, ids in self._windows(texts):
            pieces.setdefault(min(-(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP, self.window), []).append((row, ids))
        for length, waiting in sorted(pieces.items()):
            # By length alone, and filled up, so that a text's number does not depend on the texts beside it: another
            # shape may choose another kernel.
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
        """Returns logits, float64 [size, K]; rows behind those of the batch are padding."""
        ids = torch.full((size, length), self.model.config.get_text_config().pad_token_id, dtype=torch.long)
        mask = torch.zeros((size, length), dtype=torch.long)
        mask[:, 0] = 1  # attention to no position is undefined, NaN in some kernels
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            mask[row, : len(tokens)] = 1
        device = self.model.device
        logits: torch.Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits.double()
