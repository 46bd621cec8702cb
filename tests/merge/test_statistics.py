"""Fisher information and Gram matrices against algebra, and against autograd in float64."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posttrain.merge.statistics import Example, fisher_information, input_grams
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError

EXAMPLES: list[Example] = [
    ([{"role": "user", "content": f"question {number} {'long ' * number}"}], f"answer {number**3}")
    for number in range(5)
]


class LogisticModel(nn.Module):
    """log p(token | text) = log softmax(W e(the text's last token)), as a language model without layers."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(tokens, width, _weight=torch.randn(tokens, width, generator=generator))
        self.head = nn.Linear(width, tokens, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(tokens, width, generator=generator))
        self.config: Any = SimpleNamespace(model_type="logistic", max_position_embeddings=10, vocab_size=tokens)
        self.config.get_text_config = lambda: self.config

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed


class LogisticLanguageModel:
    """What the statistics use of a `LanguageModel`; texts are lists of token numbers."""

    device = torch.device("cpu")
    compiled = False

    def __init__(self, model: LogisticModel) -> None:
        self.model = model

    def decoder(self, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=self.model.embed(input_ids))

    def logits(self, states: Tensor) -> Tensor:
        return self.model.head(states)  # type: ignore[no-any-return]

    def prompt_ids(self, prompt: Any) -> list[int]:
        return [int(part) for part in prompt[0]["content"].split()]

    def answer_ids(self, answer: str) -> list[int]:
        return [int(part) for part in answer.split()]


def numbers(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def logistic() -> tuple[Any, np.ndarray, np.ndarray]:
    model = LogisticModel(7, 4)
    weights = model.head.weight.detach().double().numpy(), model.embed.weight.detach().double().numpy()
    return LogisticLanguageModel(model), *weights


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LanguageModel:
    return load_language_model(tiny_model, TaskConfig(), "float32")


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max())
    return np.asarray(shares / shares.sum())


def test_fisher_of_a_logistic_model_is_that_of_algebra(logistic: Any) -> None:
    lm, head, embedding = logistic
    examples = [(numbers("1 2"), "3"), (numbers("2"), "0 5"), (numbers("4 4 4"), "6")]
    head_fisher, embedding_fisher, likelihood = np.zeros_like(head), np.zeros_like(embedding), 0.0
    for prompt, answer in examples:
        ids, targets = lm.prompt_ids(prompt), lm.answer_ids(answer)
        of_head, of_embedding = np.zeros_like(head), np.zeros_like(embedding)
        for before, target in zip([ids[-1], *targets], targets, strict=False):
            residual = np.eye(7)[target] - softmax(head @ embedding[before])  # d log p / d logits
            of_head += np.outer(residual, embedding[before])
            of_embedding[before] += residual @ head
            likelihood += np.log(softmax(head @ embedding[before])[target])
        head_fisher += of_head**2 / len(examples)
        embedding_fisher += of_embedding**2 / len(examples)
    result = fisher_information(lm, examples)
    np.testing.assert_allclose(result.tensors["head.weight"].numpy(), head_fisher, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(result.tensors["embed.weight"].numpy(), embedding_fisher, rtol=1e-5, atol=1e-7)
    assert result.log_likelihood == pytest.approx(likelihood, rel=1e-5)
    assert (result.examples, result.tokens) == (3, 4)
    assert result.norm == pytest.approx(head_fisher.sum() + embedding_fisher.sum(), rel=1e-5)


@pytest.mark.slow
def test_sampled_answers_approach_the_models_own_fisher_information(logistic: Any) -> None:
    lm, head, embedding = logistic
    # E_y (e_y - p)_k^2 = p_k (1 - p_k), exactly; the answer of the data does not count.
    share = softmax(head @ embedding[2])
    expected = np.outer(share * (1 - share), embedding[2] ** 2)
    count = 1000
    result = fisher_information(lm, [(numbers("2"), "0")] * count, answers="sampled").tensors["head.weight"].numpy()
    # The variance of (1[y = k] - p_k)^2 is p (1 - p) (1 - 2 p)^2.
    deviation = np.sqrt(share * (1 - share) * (1 - 2 * share) ** 2 / count)
    assert (np.abs(result - expected) <= 4.5 * np.outer(deviation, embedding[2] ** 2) + 1e-6).all()
    assert np.abs(fisher_information(lm, [(numbers("2"), "0")]).tensors["head.weight"].numpy() - expected).max() > 0.1


def test_sampled_answers_follow_the_seed(tiny: LanguageModel) -> None:
    def norm(seed: int) -> float:
        return fisher_information(tiny, EXAMPLES[:2], answers="sampled", seed=seed).norm

    assert norm(3) == norm(3) != norm(4)


def test_fisher_of_a_language_model_is_that_of_autograd_in_float64(tiny_model: Path, tiny: LanguageModel) -> None:
    exact = load_language_model(tiny_model, TaskConfig(), "float32")
    exact.model.double()
    expected = {name: torch.zeros_like(parameter) for name, parameter in exact.model.named_parameters()}
    for prompt, answer in EXAMPLES:
        before, after = exact.prompt_ids(prompt), exact.answer_ids(answer)
        logits = exact.model(input_ids=torch.tensor([[*before, *after]])).logits[0]
        shares = logits[len(before) - 1 : -1].log_softmax(-1)
        likelihood = shares[range(len(after)), after].sum()
        gradients = torch.autograd.grad(likelihood, list(exact.model.parameters()))
        for total, gradient in zip(expected.values(), gradients, strict=True):
            total += gradient**2 / len(EXAMPLES)
    result = fisher_information(tiny, EXAMPLES)
    assert result.tensors.keys() == expected.keys()
    for name, total in expected.items():
        error = (result.tensors[name].double() - total).abs().max() / total.max()
        assert error < 1e-4, name
    assert all(parameter.grad is None for parameter in tiny.model.parameters())
    assert result.norm == pytest.approx(sum(float(total.sum()) for total in expected.values()), rel=1e-5)


def test_gram_matrices_of_every_linear_layer(tiny: LanguageModel) -> None:
    inputs: dict[str, list[Tensor]] = {}
    layers = {name: module for name, module in tiny.model.named_modules() if isinstance(module, nn.Linear)}
    hooks = [
        module.register_forward_hook(lambda _m, x, _y, name=name: inputs.setdefault(name, []).append(x[0][0].double()))
        for name, module in layers.items()
    ]
    try:
        with torch.no_grad():
            for prompt, answer in EXAMPLES:
                ids = [*tiny.prompt_ids(prompt), *tiny.answer_ids(answer)]
                tiny.model(input_ids=torch.tensor([ids[:-1]]))
    finally:
        for hook in hooks:
            hook.remove()
    result = input_grams(tiny, EXAMPLES)
    # Tied to the embedding, which is not a linear layer.
    assert {*result.tensors, *result.shared} == {f"{name}.weight" for name in layers} - {"lm_head.weight"}
    for name in {*result.tensors, *result.shared}:
        rows = torch.cat(inputs[name.removesuffix(".weight")])
        gram = result.tensors[result.shared.get(name, name)]
        torch.testing.assert_close(gram.double(), rows.T @ rows, rtol=1e-5, atol=1e-3)
    first = "model.layers.0."
    assert result.shared[f"{first}self_attn.v_proj.weight"] == f"{first}self_attn.q_proj.weight"
    assert result.shared[f"{first}mlp.up_proj.weight"] == f"{first}mlp.gate_proj.weight"
    assert len(result.tensors) == 2 * 4


def test_the_head_counts_where_it_is_a_layer_of_its_own(logistic: Any) -> None:
    lm, _, embedding = logistic
    result = input_grams(lm, [(numbers("1 2"), "3"), (numbers("5"), "5 1")])
    rows = embedding[[1, 2, 5, 5]]  # all tokens but each example's last
    np.testing.assert_allclose(result.tensors["head.weight"].numpy(), rows.T @ rows, rtol=1e-5)
    lm.model.head.weight = lm.model.embed.weight
    with pytest.raises(UserError, match="no linear layers"):
        input_grams(lm, [(numbers("1"), "3")])


def test_examples_beyond_the_context_are_left_out(logistic: Any, caplog: pytest.LogCaptureFixture) -> None:
    lm, _, _ = logistic
    fits, too_long = (numbers("1 " * 9), "2 3"), (numbers("1 " * 10), "2 3")
    result = fisher_information(lm, [fits, too_long])
    assert result.examples == 1
    assert "left out: 1 of 2 records" in caplog.text
    assert torch.equal(result.tensors["head.weight"], fisher_information(lm, [fits]).tensors["head.weight"])
    with pytest.raises(UserError, match="none of 1 record fits"):
        fisher_information(lm, [too_long])
