"""Ready-made classifiers of texts: any transformers model for sequence classification, encoder or decoder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from posttrain.models.folder import check_folder, first_line
from posttrain.models.language_model import check_whole
from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean

_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
_LONGEST = 2048
_STEP = 16


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

        check_folder(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            found: Any = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(f"no classifier of sequences: {first_line(error)}", where=str(folder)) from None
        model, loading = found
        check_whole(loading, folder)
        config = model.config.get_text_config()
        if config.pad_token_id is None:
            raise UserError("its config names no pad_token_id", where=str(folder), fix="add it to config.json")
        known = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
        window = min(int(one) for one in known if one)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.to(device).eval(), tokenizer, min(window, _LONGEST))

    @property
    def labels(self) -> list[str]:
        """The names of the K outputs."""
        names = self.model.config.id2label
        return [names[place] for place in sorted(names)]

    @property
    def exclusive(self) -> bool:
        """Whether a text has one of the labels, rather than any number of them."""
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
                raise UserError(what, where=where, fix=did_you_mean(label, names))
        return [names.index(label) for label in labels]

    @torch.inference_mode()
    def probabilities(self, texts: Sequence[str], places: Sequence[int]) -> npt.NDArray[np.float64]:
        """Probability of the outputs at ``places``, float64 [N]; of a text longer than the window that of any window.

        Of labels that exclude each other the probabilities are added up, of others the highest counts. A text's number
        does not hang on the texts beside it: a batch's shape depends on length alone, and it is filled up.
        """
        found = np.zeros(len(texts))
        pieces: dict[int, list[tuple[int, list[int]]]] = {}
        for row, ids in self._windows(texts):
            pieces.setdefault(min(-(-len(ids) // _STEP) * _STEP, self.window), []).append((row, ids))
        for length, waiting in sorted(pieces.items()):
            size = max(1, _BATCH_TOKENS[self.model.device.type] // length)
            for start in range(0, len(waiting), size):
                batch = waiting[start : start + size]
                logits = self._logits([ids for _, ids in batch], size, length)
                chosen = (logits.softmax(-1) if self.exclusive else logits.sigmoid())[:, list(places)]
                values = chosen.sum(-1) if self.exclusive else chosen.amax(-1)
                for (row, _), value in zip(batch, values.tolist(), strict=False):
                    found[row] = max(found[row], value)
        return found

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
        for place, one in enumerate(batch):
            ids[place, : len(one)] = torch.tensor(one, dtype=torch.long)
            mask[place, : len(one)] = 1
        device = self.model.device
        found: torch.Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return found.double()
