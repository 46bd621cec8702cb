from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.models import label_tree, likelihood
from posttrain.models.label_tree import LabelTree
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import answer_log_likelihoods, label_scores, prompt_embeddings
from posttrain.models.task import TaskConfig, Turns
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

# Labels with shared prefixes, a label that is a prefix of another, a label of a single byte, an empty label.
LABELS = ["card", "card lost", "card lost abroad", "card stolen", "refund", "refunds", "x", "y", "", "Überweisung"]

EXACT = 0.0  # a tolerance under which every label is walked to its end


def ask(text: str) -> Turns:
    return [{"role": "user", "content": text}]


PROMPTS = [ask(text) for text in ("hi", "my card is gone", "where is my money? " * 6, "", "hi there", "my card")]


@torch.no_grad()
def reference_sums(lm: LanguageModel, prompts: Sequence[Turns], labels: Sequence[str]) -> np.ndarray:
    """Each label after each prompt in its own forward pass: sums of log-probabilities [N, K]."""
    sums = np.zeros((len(prompts), len(labels)))
    for row, prompt in enumerate(prompts):
        for column, label in enumerate(labels):
            prompt_ids, answer_ids = lm.prompt_ids(prompt), lm.answer_ids(label)
            logits = lm.model(torch.tensor([prompt_ids + answer_ids])).logits[0].double().log_softmax(-1)
            sums[row, column] = sum(float(logits[len(prompt_ids) + i - 1, token]) for i, token in enumerate(answer_ids))
    return sums


def normalised(sums: np.ndarray) -> np.ndarray:
    return np.asarray(sums - np.logaddexp.reduce(sums, axis=1, keepdims=True))


def test_scores_match_one_forward_pass_per_label(tiny: LanguageModel) -> None:
    result = label_scores(tiny, PROMPTS, LABELS, tolerance=EXACT).log_probabilities
    assert result.dtype == np.float32
    assert result.shape == (len(PROMPTS), len(LABELS))
    np.testing.assert_allclose(result, normalised(reference_sums(tiny, PROMPTS, LABELS)), atol=1e-4)


def test_scores_of_the_real_model_match_too(real: LanguageModel) -> None:
    labels = ["card_arrival", "card", "Paris", "lost_or_stolen_card"]
    prompts = [ask("The capital of France is"), ask("Cash?")]
    result = label_scores(real, prompts, labels, tolerance=EXACT).log_probabilities
    np.testing.assert_allclose(result, normalised(reference_sums(real, prompts, labels)), atol=1e-4)


@pytest.mark.parametrize(("batch_tokens", "wave_tokens"), [(1, 6144), (64, 40), (2048, 1)])
def test_scores_do_not_depend_on_batches_or_order(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, batch_tokens: int, wave_tokens: int
) -> None:
    expected = normalised(reference_sums(tiny, PROMPTS, LABELS))
    monkeypatch.setattr(likelihood, "_BATCH_TOKENS", batch_tokens)
    monkeypatch.setattr(label_tree, "_WAVE_TOKENS", wave_tokens)
    monkeypatch.setattr(label_tree, "_HEAD_ROWS", 3)
    rows, columns = np.random.default_rng(batch_tokens).permutation(6), np.random.default_rng(0).permutation(10)
    result = label_scores(tiny, [PROMPTS[row] for row in rows], [LABELS[column] for column in columns], tolerance=EXACT)
    np.testing.assert_allclose(result.log_probabilities, expected[rows][:, columns], atol=1e-4)


def test_a_batch_scores_prompts_as_separate_calls_do(tiny: LanguageModel) -> None:
    prompts = [ask("same"), ask("same"), ask("sane")]
    batched = label_scores(tiny, prompts, LABELS).log_probabilities
    np.testing.assert_allclose(batched[0], batched[1], atol=1e-6)
    separate = np.concatenate([label_scores(tiny, [prompt], LABELS).log_probabilities for prompt in prompts])
    np.testing.assert_allclose(batched, separate, atol=1e-4)
    np.testing.assert_allclose(np.exp(batched).sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("labels", [["yes", "no"], ["a", "b"], ["", "a"], [chr(97 + i) for i in range(26)]])
def test_small_and_flat_label_sets(tiny: LanguageModel, labels: list[str]) -> None:
    result = label_scores(tiny, PROMPTS[:3], labels).log_probabilities
    np.testing.assert_allclose(result, normalised(reference_sums(tiny, PROMPTS[:3], labels)), atol=1e-3)


def test_no_prompts_give_no_scores(tiny: LanguageModel) -> None:
    result = label_scores(tiny, [], LABELS, embeddings=True)
    assert result.log_probabilities.shape == (0, len(LABELS))
    assert result.embeddings is not None
    assert result.embeddings.shape == prompt_embeddings(tiny, []).shape == (0, 96)


MANY = [f"{first}{second} {first}" for first in "abcdef" for second in "xyzuvw"]


@pytest.fixture(scope="module")
def many_sums(trained_model: tuple[LanguageModel, dict[str, str]]) -> np.ndarray:
    """`reference_sums` of many labels after the prompts that the model knows, and after two that it does not."""
    lm, answers = trained_model
    return normalised(reference_sums(lm, [*map(ask, answers), *PROMPTS[2:4]], MANY))


@pytest.mark.parametrize(("tolerance", "share"), [(0.9, 0.3), (0.1, 0.4), (1e-4, 0.9)])
def test_skipped_labels_hold_at_most_the_tolerance(
    trained_model: tuple[LanguageModel, dict[str, str]],
    many_sums: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    tolerance: float,
    share: float,
) -> None:
    lm, answers = trained_model
    labels = MANY
    prompts = [ask(prompt) for prompt in answers] + PROMPTS[2:4]
    branch_counts: list[int] = []
    follow = label_tree._TreeWalker.follow

    def count_branches(walker: label_tree._TreeWalker, wave: dict[int, list[label_tree._Branch]]) -> None:
        branch_counts.extend(len(due) for due in wave.values())
        follow(walker, wave)

    monkeypatch.setattr(label_tree._TreeWalker, "follow", count_branches)
    result = np.exp(label_scores(lm, prompts, labels, tolerance=tolerance).log_probabilities.astype(np.float64))
    exact = np.exp(many_sums)
    assert (np.abs(result - exact).sum(axis=1) / 2 <= tolerance + 1e-4).all()
    assert [labels[column] for column in result[: len(answers)].argmax(axis=1)] == list(answers.values())
    branch_counts.clear()
    label_scores(lm, prompts[: len(answers)], labels, tolerance=tolerance)
    all_branches = len(answers) * len(LabelTree([lm.answer_ids(label) for label in labels]).edges)
    assert 0 < sum(branch_counts) < all_branches * share, "a model that knows the task skips most branches"


def test_without_a_tolerance_every_model_does_the_same_work(
    trained_model: tuple[LanguageModel, dict[str, str]], tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If latency depended on how confident a model is, a gate on latency would be decided by chance."""
    labels = MANY
    shapes: list[list[torch.Size]] = []
    for lm in (trained_model[0], tiny):
        shapes.append([])
        forward = lm.decoder.forward

        def record_shape(*arguments: Any, forward: Any = forward, **options: Any) -> Any:
            shapes[-1].append(options["input_ids"].shape)
            return forward(*arguments, **options)

        monkeypatch.setattr(lm.decoder, "forward", record_shape)
        label_scores(lm, PROMPTS[:1], labels, tolerance=0)
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) > 1


def test_a_label_in_exact_is_scored_exactly(
    trained_model: tuple[LanguageModel, dict[str, str]], many_sums: np.ndarray
) -> None:
    lm, answers = trained_model
    labels = MANY
    prompts = [ask(prompt) for prompt in answers]
    expected = many_sums[: len(prompts)]
    worst = expected.argmin(axis=1)
    rows = np.arange(len(prompts))
    result = label_scores(lm, prompts, labels, tolerance=1e-3, exact=worst.tolist()).log_probabilities
    np.testing.assert_allclose(result[rows, worst], expected[rows, worst], atol=2e-3)
    approximate = label_scores(lm, prompts, labels, tolerance=1e-3).log_probabilities
    assert (np.abs(approximate[rows, worst] - expected[rows, worst]) > 0.1).any(), "the tolerance skips some labels"


def test_bfloat16_is_close(tiny_model: Path, tiny: LanguageModel) -> None:
    lm = load_language_model(tiny_model, TaskConfig())
    assert lm.model.dtype == torch.bfloat16
    result = label_scores(lm, PROMPTS, LABELS).log_probabilities
    exact = normalised(reference_sums(tiny, PROMPTS, LABELS))
    np.testing.assert_allclose(np.exp(result), np.exp(exact), atol=0.01)
    np.testing.assert_allclose(result[exact > -7], exact[exact > -7], atol=0.3)


def test_labels_with_equal_tokens_are_refused(tiny: LanguageModel) -> None:
    with pytest.raises(UserError, match="`refund` and `refund`"):
        label_scores(tiny, PROMPTS, ["card", "refund", "x", "refund"])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma2", {"head_dim": 32, "sliding_window": 8}),
        ("gemma3_text", {"head_dim": 32, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}),
        ("gpt_neox", {}),
        ("phi3", {}),
        ("mixtral", {"sliding_window": None}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        ("bloom", {"n_layer": 2, "n_head": 2}),
        ("falcon", {"alibi": True}),
    ],
)
def test_scores_of_other_families_match_their_forward_pass(
    family: Callable[..., LanguageModel], kind: str, settings: dict[str, object]
) -> None:
    """Windows, caps, scales, learnt positions: whatever the family does, scores are those of its own forward."""
    lm = family(kind, **settings)
    labels = ["card", "card lost", "refund"]
    result = label_scores(lm, PROMPTS[:4], labels, tolerance=EXACT, embeddings=True)
    np.testing.assert_allclose(result.log_probabilities, normalised(reference_sums(lm, PROMPTS[:4], labels)), atol=2e-4)
    np.testing.assert_allclose(result.embeddings, mean_states(lm, PROMPTS[:4]), atol=1e-4)


@torch.no_grad()
def mean_states(lm: LanguageModel, prompts: Sequence[Turns]) -> np.ndarray:
    """Means of the last hidden states over the tokens from the user's text on, one prompt at a time."""
    means = []
    for prompt in prompts:
        ids = lm.prompt_ids(prompt)
        states = lm.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        start = len(lm.tokenizer("<|user|>", add_special_tokens=False)["input_ids"])
        means.append(states[start:].mean(0))
    return torch.stack(means).numpy()


def test_an_embedding_does_not_depend_on_the_batch(tiny: LanguageModel) -> None:
    """Hard cases are compared with the pool, whose embeddings come from another call."""
    prompts = [ask(text) for text in ("my card is gone", "my card is lost", "my card", "hello")]
    embeddings = prompt_embeddings(tiny, prompts)
    np.testing.assert_allclose(prompt_embeddings(tiny, prompts[:2]), embeddings[:2], atol=1e-5)
    for row, prompt in enumerate(prompts):
        np.testing.assert_allclose(prompt_embeddings(tiny, [prompt])[0], embeddings[row], atol=1e-5)
    np.testing.assert_allclose(prompt_embeddings(tiny, [prompts[0]] * 3), embeddings[[0, 0, 0]], atol=1e-5)


def test_embeddings_are_mean_hidden_states(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mean_states(tiny, PROMPTS)
    for batch_tokens in (1, 50, 2048):
        monkeypatch.setattr(likelihood, "_BATCH_TOKENS", batch_tokens)
        np.testing.assert_allclose(prompt_embeddings(tiny, PROMPTS), expected, atol=1e-4)
    embeddings = label_scores(tiny, PROMPTS, LABELS, embeddings=True).embeddings
    np.testing.assert_array_equal(embeddings, prompt_embeddings(tiny, PROMPTS))
    assert label_scores(tiny, PROMPTS, LABELS).embeddings is None


def test_answer_log_likelihoods_match_the_reference(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["yes", "", "a longer answer, with words", "no", "x\ny", "ö"]
    expected = np.diagonal(reference_sums(tiny, PROMPTS, answers))
    for batch_tokens in (1, 2048):
        monkeypatch.setattr(likelihood, "_WINDOW_BATCH_TOKENS", {"cpu": batch_tokens})
        sums, counts = answer_log_likelihoods(tiny, PROMPTS, answers)
        assert (sums.dtype, counts.dtype) == (np.float64, np.int64)
        np.testing.assert_allclose(sums, expected, atol=1e-3)
        assert counts.tolist() == [len(tiny.answer_ids(answer)) for answer in answers]


def test_every_assistant_turn_counts_in_a_conversation(tiny: LanguageModel) -> None:
    turns = [*ask("one"), {"role": "assistant", "content": "two"}, *ask("three")]
    sums, counts = answer_log_likelihoods(tiny, [turns], ["four"])
    parts = reference_sums(tiny, [turns[:1]], ["two"])[0, 0] + reference_sums(tiny, [turns], ["four"])[0, 0]
    assert sums[0] == pytest.approx(parts, abs=1e-3)
    assert counts[0] == len("two") + len("four") + 2


def test_no_answers_give_no_likelihoods(tiny: LanguageModel) -> None:
    sums, counts = answer_log_likelihoods(tiny, [], [])
    assert sums.shape == counts.shape == (0,)
