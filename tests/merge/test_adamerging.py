"""AdaMerging: entropies and their gradient against references, limits, and the recipe that it ends in."""

import shutil
from pathlib import Path

import pytest
import torch
from model_family import weights_of, write_relative

from posttrain.merge.adamerging import (
    AdaMergingConfig,
    MergedModel,
    UnlabelledTask,
    entropy,
    learn_coefficients,
    prompt_entropies,
)
from posttrain.merge.api import merge
from posttrain.merge.recipe import Recipe
from posttrain.models.language_model import load_language_model
from posttrain.models.likelihood import label_scores
from posttrain.models.packing import packed_attention
from posttrain.models.task import TaskConfig, Turns
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError

LABELS = ["card", "cash", "loan"]

PROMPTS: list[Turns] = [
    [{"role": "user", "content": text}] for text in ("my card", "some money", "x", "a longer text of a customer")
]

LABELLED = UnlabelledTask("intents", TaskConfig(system="Name it.", labels=LABELS), PROMPTS)
FREE = UnlabelledTask("free", TaskConfig(), PROMPTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, family: Path) -> Path:
    """``base``, ``a`` and ``b`` with task vectors large enough to change what the model is sure of."""
    root = tmp_path_factory.mktemp("adamerging")
    shutil.copytree(family / "base", root / "base")
    for seed, name in enumerate("ab", 1):
        write_relative(root / name, root / "base", seed, scale=0.08)
    return root


def test_entropy_is_that_of_the_softmax() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    assert torch.allclose(entropy(logits), -(p * p.log()).sum(-1), atol=1e-12)
    assert entropy(torch.zeros(4)).item() == pytest.approx(torch.log(torch.tensor(4.0)).item())
    assert entropy(torch.tensor([0.0, -1e4])).item() == 0, "and not NaN"


@pytest.mark.parametrize("packs", [True, False])
def test_entropies_are_those_of_labels_and_of_the_answers_first_token(models: Path, packs: bool) -> None:
    lm = load_language_model(models / "a", LABELLED.task, "float32")
    scores = torch.from_numpy(label_scores(lm, PROMPTS, LABELS, tolerance=0).log_probabilities).double()
    with packed_attention(lm, 100) as possible, torch.no_grad():
        assert possible
        # The attention of packed rows reads no padding, so each way has its own.
        if packs:
            own = torch.cat(list(prompt_entropies(lm, PROMPTS, True)))
            assert torch.allclose(own.double(), entropy(scores), atol=1e-5)
    if not packs:
        with torch.no_grad():
            own = torch.cat(list(prompt_entropies(lm, PROMPTS, False)))
        assert torch.allclose(own.double(), entropy(scores), atol=1e-5)
    lm.task = FREE.task
    with torch.no_grad():
        free = torch.cat(list(prompt_entropies(lm, PROMPTS, False)))
        for prompt, value in zip(PROMPTS, free, strict=True):
            logits = lm.model(torch.tensor([lm.prompt_ids(prompt)])).logits[0, -1].double()
            assert value.item() == pytest.approx(entropy(logits).item(), abs=1e-5)


@pytest.mark.slow
def test_the_gradient_is_that_of_finite_differences(models: Path) -> None:
    assert len(MergedModel(models / "base", [models / "a"], by_layer=False).groups) == 1
    merged = MergedModel(models / "base", [models / "a", models / "b"], by_layer=True)
    assert len(merged.groups) == 6, "four layers, the embedding and the last norm"
    start = torch.full((2, len(merged.groups)), 0.4, dtype=torch.float64)
    batches = [(LABELLED.task, PROMPTS[:1]), (FREE.task, PROMPTS[2:3])]
    _, gradient = merged.entropy_and_gradient(start, batches, False)

    def entropy_at(coefficients: torch.Tensor) -> float:
        return merged.entropy_and_gradient(coefficients, batches, False)[0]

    step = 2e-2
    for model in range(2):
        for group in range(model, len(merged.groups), 2):
            apart = torch.zeros_like(start)
            apart[model, group] = step
            # Fourth order, as float32 leaves no room for small steps.
            difference = 8 * (entropy_at(start + apart) - entropy_at(start - apart))
            difference -= entropy_at(start + 2 * apart) - entropy_at(start - 2 * apart)
            expected = difference / (12 * step)
            assert gradient[model, group].item() == pytest.approx(expected, rel=0.03, abs=3e-4)
    assert gradient.abs().max() > 0.01, "else nothing was compared"


@pytest.mark.slow
def test_the_entropy_falls_and_the_recipe_gives_the_same_weights(models: Path, tmp_path: Path) -> None:
    config = AdaMergingConfig(steps=13, learning_rate=0.06, batch_size=4)
    learned = learn_coefficients(models / "base", [models / "a", models / "b"], [LABELLED, FREE], config, seed=1)
    assert learned.entropies[-1] < learned.entropies[0] - 0.02
    assert learned.last < learned.first
    plain = Recipe.read({"method": "task_arithmetic", "base": "base", "models": ["a", "b"], "dtype": "float32"}, "test")
    merge(learned.recipe(plain), tmp_path / "out", root=models)
    base, parts = weights_of(models / "base"), [weights_of(models / name) for name in "ab"]
    coefficients = {group: learned.values[:, index] for index, group in enumerate(learned.groups)}
    for name, weight in weights_of(tmp_path / "out").items():
        group = next(group for group in coefficients if group in name)  # layers come first
        expected = base[name] + sum(
            value * (part[name] - base[name]) for value, part in zip(coefficients[group], parts, strict=True)
        )
        assert torch.allclose(weight, expected, atol=2e-6), name


def test_one_coefficient_a_model_is_one_number_in_the_recipe(models: Path) -> None:
    config = AdaMergingConfig(steps=2, by_layer=False, batch_size=2)
    learned, again = (learn_coefficients(models / "base", [models / "a"], [FREE], config) for _ in range(2))
    assert torch.equal(learned.values, again.values)
    plain = Recipe.read({"method": "task_arithmetic", "base": "base", "models": ["base", "a"]}, "test")
    (entry,) = learned.recipe(plain).models
    assert entry.parameters == {"weight": pytest.approx(learned.values.item(), abs=1e-6)}
    assert learned.values.item() != 0.3


def test_zero_task_vectors_leave_the_coefficients_where_they_start(models: Path) -> None:
    config = AdaMergingConfig(steps=2, batch_size=2)
    learned = learn_coefficients(models / "base", [models / "base"], [LABELLED], config)
    assert torch.equal(learned.values, torch.full_like(learned.values, 0.3))
    assert learned.entropies[0] > 0


def test_mistakes_are_named(models: Path, tmp_path: Path) -> None:
    config = AdaMergingConfig(steps=1)
    with pytest.raises(UserError, match="free: has no prompts"):
        learn_coefficients(models / "base", [models / "a"], [UnlabelledTask("free", TaskConfig(), [])], config)
    with pytest.raises(UserError, match="name a file of records with --data"):
        learn_coefficients(models / "base", [models / "a"], [], config)
    with pytest.raises(UserError, match="steps"):
        AdaMergingConfig.read({"steps": 0}, "--set")
    huge = config.model_copy(update={"start": 1e38})
    with pytest.raises(UserError, match="the entropy is not finite; lower learning_rate or start"):
        learn_coefficients(models / "base", [models / "a"], [FREE], huge)
    write_tiny_model(tmp_path / "narrow", width=64)
    with pytest.raises(UserError, match=r"narrow: has no tensor model\.embed_tokens\.weight as the base has it"):
        learn_coefficients(models / "base", [tmp_path / "narrow"], [FREE], config)
