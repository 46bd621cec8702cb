from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain.attribution.influence.causal_lm import encode_record, functional_causal_lm, load_adapter
from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.gradients import record_gradients
from posttrain.attribution.influence.ihvp.conjugate_gradient import ConjugateGradient
from posttrain.attribution.influence.ihvp.ekfac import Ekfac
from posttrain.attribution.influence.influence_functions import influence_functions
from posttrain.attribution.influence.losses import IGNORE_INDEX
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.influence.tracin import AdamMoments, TracInCheckpoint, less, tracin
from posttrain.attribution.influence.trak import trak
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


def all_gradients(model: FunctionalModel, records: list, **settings) -> torch.Tensor:
    return torch.cat([result for _, result in record_gradients(model, records, **settings)])


def losses(model: FunctionalModel, records: list) -> torch.Tensor:
    return model.losses_at(model.parameters, model.batch(records)).detach().double()


def test_losses_are_the_answers_likelihoods(adapted, records) -> None:
    sums, _ = answer_log_likelihoods(adapted, [user(prompt) for prompt in PROMPTS], ANSWERS)
    for block in (1, 2, 5):
        parts = [records[start : start + block] for start in range(0, len(records), block)]
        result = torch.cat([losses(functional_causal_lm(adapted), part) for part in parts])
        np.testing.assert_allclose(result.numpy(), -sums, rtol=1e-5)


def test_gradients_equal_the_adapters_by_autograd_in_every_mode_and_block_size(adapted, records) -> None:
    model = functional_causal_lm(adapted)
    assert all("lora" in name for name in model.parameters)
    expected = []
    for record in records:
        adapted.model.zero_grad()
        ids = torch.tensor([record.ids])
        targets = ids.where(torch.tensor([record.supervised]), -100)
        answer_tokens = sum(record.supervised)
        (adapted.model(input_ids=ids, labels=targets).loss * answer_tokens).backward()
        grads = [value.grad.flatten() for name, value in adapted.model.named_parameters() if "lora" in name]
        expected.append(torch.cat(grads))
    expected = torch.stack(expected)
    assert float(expected.norm(dim=1).min()) > 0.1
    for mode in ("vmap", "loop"):
        for block_size in (1, 5):
            torch.testing.assert_close(
                all_gradients(model, records, mode=mode, block_size=block_size), expected, rtol=1e-3, atol=1e-4
            )


def test_only_the_last_answer_counts_by_default(adapted) -> None:
    prompt = [*user("hi"), {"role": "assistant", "content": "hello"}, *user("where?")]
    last, all_turns = encode_record(adapted, prompt, "z"), encode_record(adapted, prompt, "z", earlier_turns=True)
    assert last.ids == all_turns.ids
    assert (
        adapted.tokenizer.decode([i for i, supervised in zip(last.ids, last.supervised, strict=True) if supervised])
        == "z<|end|>"
    )
    answer_ids = [i for i, supervised in zip(all_turns.ids, all_turns.supervised, strict=True) if supervised]
    assert adapted.tokenizer.decode(answer_ids) == "hello<|end|>z<|end|>"
    model = functional_causal_lm(adapted)
    assert float(losses(model, [all_turns])[0]) > float(losses(model, [last])[0]) + 1


def test_curvature_products_equal_finite_differences(adapted, records) -> None:
    """The form v' J' L J v is the variance of the change of logits along v under the model's probabilities."""
    model = functional_causal_lm(adapted)
    parameters = model.flat(model.parameters)
    direction = torch.randn(len(parameters), generator=torch.Generator().manual_seed(1))
    direction /= direction.norm()
    result = float(direction @ Curvature(model, records).product(direction[:, None])[:, 0])
    batch, step = model.batch(records), 0.02
    with torch.no_grad():
        ends = [model.outputs_at(model.unflat(parameters + sign * step * direction), batch) for sign in (-1, 1)]
        change = (ends[1] - ends[0]) / (2 * step)
        p = model.outputs_at(model.parameters, batch).softmax(-1)
    variances = (p * change**2).sum(-1) - (p * change).sum(-1) ** 2
    expected = float(variances[batch[-1] != IGNORE_INDEX].sum()) / len(records)
    assert result == pytest.approx(expected, rel=0.02)
    assert result > 0


@pytest.mark.slow
def test_with_every_method_a_record_influences_itself_most(adapted, records, tmp_path) -> None:
    model = functional_causal_lm(adapted)
    moments = AdamMoments(torch.zeros(model.size), torch.ones(model.size) * 1e-3, 5)
    point = TracInCheckpoint(model.parameters, 0.1, moments)
    projection = Projection(512)
    result = {
        "ekfac": influence_functions(model, records, records, damping=0.1, solver=Ekfac(samples=2)),
        "conjugate gradient": influence_functions(model, records, records, damping=1.0, solver=ConjugateGradient(1e-3)),
        "tracin": tracin(model, [point], records, records, projection=projection, folder=tmp_path),
        "less": less(model, [point], records, records, projection=projection, folder=tmp_path),
        "trak": trak([model], records, records, projection=Projection(3), damping=1.0, folder=tmp_path),
    }
    for name, scores in result.items():
        assert scores.scores.shape == (5, 5), name
        assert np.isfinite(scores.scores).all(), name
        assert (scores.scores.diagonal() > 0).all(), name
    for name in ("ekfac", "conjugate gradient", "tracin", "less"):
        first = result[name].scores.argmax(axis=0)
        assert sum(int(a == b) for a, b in zip(first, range(5), strict=True)) >= 4, name
    assert result["conjugate gradient"].residuals.max() < 2e-3
    assert tracin(model, [point], records, records, projection=projection, folder=tmp_path).evaluations == 0


def test_a_loaded_adapter_has_the_gradients_of_the_saved_one(adapted, records, tiny_model, tmp_path) -> None:
    adapted.model.save_pretrained(tmp_path / "adapter")
    loaded = load_adapter(load_language_model(tiny_model, adapted.task, "float32"), tmp_path / "adapter")
    actual, reference = functional_causal_lm(adapted), functional_causal_lm(loaded)
    assert list(actual.parameters) == list(reference.parameters)
    torch.testing.assert_close(all_gradients(reference, records), all_gradients(actual, records))


def test_long_records_frozen_models_and_other_adapters_are_refused(adapted, tiny_model, tmp_path) -> None:
    with pytest.raises(UserError, match=r"record of 1[0-9]{3} tokens is longer than the model's 1024"):
        encode_record(adapted, user("x" * 1100), "y")
    adapted.model.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter of the model requires a gradient"):
        functional_causal_lm(adapted)
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors here"):
        load_adapter(load_language_model(tiny_model, adapted.task, "float32"), tmp_path)
    from posttrain.models.tiny import write_tiny_model

    adapted.model.save_pretrained(tmp_path / "adapter")
    for name, size in (("wide", {"width": 64}), ("deep", {"layers": 3})):
        other = write_tiny_model(tmp_path / name, **size)
        with pytest.raises(UserError, match="does not fit the model"):
            load_adapter(load_language_model(other, adapted.task, "float32"), tmp_path / "adapter")
