"""The importance of layers and heads against finite differences."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.models.chat import TokenizedExample
from posttrain.models.importance import importance_by_activation, importance_by_gradient
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import sequence_log_likelihoods
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model

Change = Callable[[LanguageModel], None]
HEADS, SIZE, LAYERS = 4, 32, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m", seed=3, width=HEADS * SIZE, layers=LAYERS)


@pytest.fixture(scope="module")
def examples(folder: Path) -> list[TokenizedExample]:
    lm = load(folder)
    pairs = [("how are you", "well"), ("a", "a longer answer, with more tokens"), ("two and two", "4"), ("x", "y")]
    return [lm.encode([{"role": "user", "content": prompt}], answer) for prompt, answer in pairs]


def load(folder: Path) -> LanguageModel:
    lm = load_language_model(folder, TaskConfig(), "float32")
    lm.model.double()
    return lm


def losses(lm: LanguageModel, examples: list[TokenizedExample]) -> np.ndarray:
    """Returns each record's loss, without batches."""
    total = []
    for example in examples:
        with torch.no_grad():
            logits = lm.model(input_ids=torch.tensor([example.ids])).logits[0].log_softmax(-1)
        at = [i for i, on in enumerate(example.supervised) if on and i > 0]
        total.append(-sum(float(logits[i - 1, example.ids[i]]) for i in at))
    return np.array(total)


def without_head(lm: LanguageModel, layer: int, head: int, scale: float = 0.0) -> None:
    lm.model.model.layers[layer].self_attn.o_proj.weight.data[:, head * SIZE : (head + 1) * SIZE] *= scale


@pytest.mark.slow
def test_the_gradient_is_the_change_of_the_loss_as_a_part_fades(folder: Path, examples: list[TokenizedExample]) -> None:
    measured = importance_by_gradient(load(folder), examples)
    step = 1e-2  # norms compute in float32, so that less is lost in rounding
    for layer in range(LAYERS):
        for head in (0, 3):
            more, less = load(folder), load(folder)
            without_head(more, layer, head, 1 + step)
            without_head(less, layer, head, 1 - step)
            slope = np.abs(losses(more, examples) - losses(less, examples)) / (2 * step)
            np.testing.assert_allclose(measured.heads[:, layer, head], slope, rtol=3e-3, atol=1e-4)


def test_the_gradient_of_a_layer_is_that_of_what_it_adds(folder: Path, examples: list[TokenizedExample]) -> None:
    measured, step = importance_by_gradient(load(folder), examples), 1e-2
    for layer in range(LAYERS):
        found = []
        for scale in (1 + step, 1 - step):
            lm = load(folder)

            def fade(module: object, args: tuple[torch.Tensor], output: torch.Tensor, scale: float = scale) -> object:
                return args[0] + scale * (output - args[0])

            lm.model.model.layers[layer].register_forward_hook(fade)
            found.append(losses(lm, examples))
        np.testing.assert_allclose(measured.layers[:, layer], np.abs(found[0] - found[1]) / (2 * step), rtol=3e-3)


def test_tokens_and_the_model_stay_as_they_are(folder: Path, examples: list[TokenizedExample]) -> None:
    lm = load(folder)
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    expected, tokens = sequence_log_likelihoods(lm, examples)
    measured = importance_by_gradient(lm, examples)
    assert measured.tokens.tolist() == tokens.tolist() == [sum(e.supervised) for e in examples]
    assert np.array_equal(sequence_log_likelihoods(lm, examples)[0], expected)
    for name, tensor in lm.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.requires_grad and parameter.grad is None for parameter in lm.model.parameters())


def test_activations_of_a_batch_are_those_of_its_records(folder: Path, examples: list[TokenizedExample]) -> None:
    """Without those of the padding: squares of records' means add up, and a layer's changes by token."""
    together = importance_by_activation(load(folder), examples)
    alone = [importance_by_activation(load(folder), [example]) for example in examples]
    tokens = np.array([len(example.ids) for example in examples])
    for name in ("heads", "inner"):
        squares = sum(getattr(each, name) ** 2 for each in alone)
        np.testing.assert_allclose(getattr(together, name) ** 2, squares, rtol=1e-4)
    changes = sum(count * each.layers for count, each in zip(tokens, alone, strict=True))
    np.testing.assert_allclose(together.layers * tokens.sum(), changes, rtol=1e-4)
