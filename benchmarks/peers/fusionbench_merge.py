"""Merges with FusionBench's ``regmean_merging`` or ``fisher_merging``, for ``benchmarks/merge_vs_fusionbench.py``.

    fusionbench_merge.py SETTINGS.json

The file lists merges. Each has ``method`` (``regmean`` or ``fisher``), ``models`` (folders in Hugging Face layout),
``records`` (for each model a JSON file with a list of ``input_ids`` and ``answer_ids``), ``out``, ``dtype``, the
``options`` of FusionBench's function, and for ``fisher`` the ``gradient``: of the ``answer``, or of the ``labels``. The
merged model is written to ``out``.

Both functions ask a Transformers trainer for batches. `Records` stands for it, with one record a batch.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fusion_bench.method.fisher_merging.fisher_merging import fisher_merging
from fusion_bench.method.regmean.regmean import regmean_merging
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


class Records:
    """The methods of a trainer that FusionBench calls: batches of one record, without padding."""

    _train_batch_size = 1

    def __init__(self, file: str, names: list[str]) -> None:
        rows = json.loads(Path(file).read_text())
        self.batches = [{name: torch.tensor([row[name]]) for name in names} for row in rows]

    def get_train_dataloader(self) -> list[dict[str, Tensor]]:
        return self.batches

    def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return inputs


class AnswerModel(nn.Module):
    """Gives FusionBench's Fisher information, which is written for classifiers, the answer of a language model.

    FusionBench takes the gradient of ``loss`` where there is one logit, as in a regression, and otherwise that of
    sum sqrt(p) log p over all logits.

    Args:
        model: the language model.
        gradient: ``answer``: the loss is minus the log-likelihood of the answer's tokens; ``labels``: each token is one
            classification over the vocabulary.
    """

    def __init__(self, model: nn.Module, gradient: str) -> None:
        super().__init__()
        self.model, self.gradient = model, gradient

    def forward(self, input_ids: Tensor, answer_ids: Tensor) -> SimpleNamespace:
        """Returns ``logits`` [1, 1] and ``loss``, or ``logits`` [answer tokens, vocabulary]."""
        length = answer_ids.shape[1]
        logits = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=length).logits[0]
        if self.gradient == "labels":
            return SimpleNamespace(logits=logits)
        loss = nn.functional.cross_entropy(logits, answer_ids[0], reduction="sum")
        return SimpleNamespace(logits=loss.reshape(1, 1), loss=loss)


def merge(settings: dict[str, Any], models: list[Any]) -> dict[str, Tensor]:
    """Returns the merged parameters by their names."""
    if settings["method"] == "regmean":
        records = [Records(file, ["input_ids"]) for file in settings["records"]]
        counts = [len(data.batches) for data in records]
        return dict(regmean_merging(models, records, [], counts, **settings["options"]))
    records = [Records(file, ["input_ids", "answer_ids"]) for file in settings["records"]]
    counts = [len(data.batches) for data in records]
    wrapped: list[nn.Module] = [AnswerModel(model, settings["gradient"]) for model in models]
    merged = fisher_merging(wrapped, records, [], counts, **settings["options"])
    return {name.removeprefix("model."): value for name, value in merged.items()}


def main() -> None:
    """Loads the models of each merge, merges them and writes the result."""
    for settings in json.loads(Path(sys.argv[1]).read_text()):
        dtype = getattr(torch, settings["dtype"])
        models = [AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() for folder in settings["models"]]
        merged = merge(settings, models)
        models[0].load_state_dict(merged, strict=False)
        models[0].save_pretrained(settings["out"])


if __name__ == "__main__":
    main()
