from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.attribution.causal_lm import encode_record, influence_model, load_adapter
from posttrain.attribution.influence import InfluenceModel, influence_functions
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import answer_log_likelihoods
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError

PROMPTS = ["hi", "my card is gone", "where?", "what is the rate on my loan, please", ""]
ANSWERS = ["ax", "card", "z", "rate", "nothing at all"]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def adapted(tiny_model: Path) -> LanguageModel:
    """The tiny model with a LoRA adapter whose two matrices are both random."""
    from peft import LoraConfig, get_peft_model

    lm = load_language_model(tiny_model, TaskConfig(system="Be brief."), "float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(lm.model, settings)
        for name, value in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.1)
    return LanguageModel(model.eval(), lm.tokenizer, lm.task)


@pytest.fixture
def records(adapted: LanguageModel) -> list:
    return [encode_record(adapted, user(prompt), answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]


def all_gradients(model: InfluenceModel, records: list) -> torch.Tensor:
    """The gradients of each record, [N, P], layer by layer."""
    gradients = dict(model.gradients(model.collate(records)))
    return torch.cat([gradients[name].flatten(1) for name in model.layers], 1)


def losses(model: InfluenceModel, records: list) -> torch.Tensor:
    batch = model.collate(records)
    return model.loss(model.outputs(batch), batch).detach().double()


def test_losses_are_the_answers_likelihoods(adapted, records) -> None:
    sums, _ = answer_log_likelihoods(adapted, [user(prompt) for prompt in PROMPTS], ANSWERS)
    for block in (1, 2, 5):
        parts = [records[start : start + block] for start in range(0, len(records), block)]
        result = torch.cat([losses(influence_model(adapted), part) for part in parts])
        np.testing.assert_allclose(result.numpy(), -sums, rtol=1e-5)


def test_gradients_equal_the_adapters_by_autograd(adapted, records) -> None:
    model = influence_model(adapted)
    assert all("lora" in name for name in model.layers)
    expected = []
    for record in records:
        adapted.model.zero_grad()
        ids = torch.tensor([record.ids])
        targets = ids.where(torch.tensor([record.supervised]), -100)
        (adapted.model(input_ids=ids, labels=targets).loss * sum(record.supervised)).backward()
        expected.append(torch.cat([layer.weight.grad.flatten() for layer in model.layers.values()]))
    expected = torch.stack(expected).double()
    assert float(expected.norm(dim=1).min()) > 0.1
    torch.testing.assert_close(all_gradients(model, records), expected, rtol=1e-3, atol=1e-4)
    alone = torch.cat([all_gradients(model, [record]) for record in records])
    torch.testing.assert_close(alone, expected, rtol=1e-3, atol=1e-4)


def test_only_the_last_answer_counts(adapted) -> None:
    prompt = [*user("hi"), {"role": "assistant", "content": "hello"}, *user("where?")]
    record = encode_record(adapted, prompt, "z")
    supervised = [i for i, supervised in zip(record.ids, record.supervised, strict=True) if supervised]
    assert adapted.tokenizer.decode(supervised) == "z<|end|>"


@pytest.mark.slow
def test_a_record_influences_itself_most(adapted, records) -> None:
    scores = influence_functions(influence_model(adapted), records, records, damping=0.1)
    assert scores.shape == (5, 5)
    assert (scores.diagonal() > 0).all()
    assert sum(int(a == b) for a, b in zip(scores.argmax(axis=0), range(5), strict=True)) >= 4


def test_a_loaded_adapter_has_the_gradients_of_the_saved_one(adapted, records, tiny_model, tmp_path) -> None:
    adapted.model.save_pretrained(tmp_path / "adapter")
    loaded = load_adapter(load_language_model(tiny_model, adapted.task, "float32"), tmp_path / "adapter")
    actual, reference = influence_model(adapted), influence_model(loaded)
    assert list(actual.layers) == list(reference.layers)
    torch.testing.assert_close(all_gradients(reference, records), all_gradients(actual, records))


def test_long_records_frozen_models_and_other_adapters_are_refused(adapted, tiny_model, tmp_path) -> None:
    with pytest.raises(UserError, match=r"record of 1[0-9]{3} tokens is longer than the model's 1024"):
        encode_record(adapted, user("x" * 1100), "y")
    adapted.model.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter of the model requires a gradient"):
        influence_model(adapted).layers  # noqa: B018
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors here"):
        load_adapter(load_language_model(tiny_model, adapted.task, "float32"), tmp_path)
    from posttrain.models.tiny import write_tiny_model

    adapted.model.save_pretrained(tmp_path / "adapter")
    for name, size in (("wide", {"width": 64}), ("deep", {"layers": 3})):
        other = write_tiny_model(tmp_path / name, **size)
        with pytest.raises(UserError, match="does not fit the model"):
            load_adapter(load_language_model(other, adapted.task, "float32"), tmp_path / "adapter")
