"""Reward models and classifiers: saved in transformers' format, and loaded again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models.classifier import class_logits, load_classifier, output_names
from posttrain.models.head import predicting_states
from posttrain.models.language_model import save_language_model
from posttrain.models.packing import pack
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError

TASK = TaskConfig()


@torch.no_grad()
def output_logits(prepared: Any) -> torch.Tensor:
    """The outputs of the trainer's model for each sequence."""
    return class_logits(prepared.lm, predicting_states(prepared.lm, pack(list(prepared.objective.units))))


@pytest.mark.parametrize(
    ("objective", "names"), [("reward", ["reward"]), ("classification", ["card", "refund", "top up"])]
)
def test_the_saved_model_gives_the_trainers_outputs(
    prepare: Any, tmp_path: Path, objective: str, names: list[str]
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    prepared = prepare(objective)
    expected = output_logits(prepared)
    save_language_model(prepared.lm, tmp_path / "out", "float32")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=len(names)).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert list(model.config.id2label.values()) == names
    texts = [sequence.ids[:-1] for unit in prepared.objective.units for sequence in unit]
    batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    loaded = load_classifier(tmp_path / "out", TASK, "float32", names)
    assert output_names(loaded) == names
    assert torch.equal(loaded.model.score.weight, prepared.lm.model.score.weight)


def test_a_padding_token_that_ends_answers_is_skipped(prepare: Any, tmp_path: Path) -> None:
    """Some tokenizers pad with the stop token; transformers then uses the token before it, as the trainer does."""
    prepared = prepare("reward")
    prepared.lm.model.config.pad_token_id = prepared.lm.tokenizer.eos_token_id
    objective = type(prepared.objective)(
        [[*unit] for unit in prepared.objective.units], prepared.objective.config, prepared.lm, [0.0] * 8
    )
    for unit in objective.units:
        for sequence in unit:
            assert sequence.ids[-2] != prepared.lm.tokenizer.eos_token_id
    with torch.no_grad():
        result = class_logits(prepared.lm, predicting_states(prepared.lm, pack(list(objective.units))))
        prepared.lm.model.set_attn_implementation("eager")
        ids = [*objective.units[0][0].ids[:-1], prepared.lm.tokenizer.eos_token_id]
        torch.testing.assert_close(prepared.lm.model(input_ids=torch.tensor([ids])).logits, result[:1])


def test_mismatched_classifiers_are_one_line_errors(prepare: Any, tiny_model: Path, tmp_path: Path) -> None:
    save_language_model(prepare("classification").lm, tmp_path / "classes")
    with pytest.raises(UserError, match="has the outputs card, refund, top up instead of reward"):
        load_classifier(tmp_path / "classes", TASK, "float32", ["reward"])
    config = json.loads((tmp_path / "classes" / "config.json").read_text())
    (tmp_path / "classes" / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(UserError, match=r"has the shape \[288, 96\], and config\.json asks for \[64, 96\]") as caught:
        load_classifier(tmp_path / "classes", TASK, "float32", ["card", "refund", "top up"])
    assert "\n" not in str(caught.value)
