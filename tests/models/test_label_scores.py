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

# Labels that share beginnings, one the beginning of another, one of a single byte, one of nothing.
LABELS = ["card", "card lost", "card lost abroad", "card stolen", "refund", "refunds", "x", "y", "", "Überweisung"]

EXACT = 0.0  # a tolerance under which every label is walked to its end


def ask(text: str) -> Turns:
    return [{"role": "user", "content": text}]


PROMPTS = [ask(text) for text in ("hi", "my card is gone", "where is my money? " * 6, "", "hi there", "my card")]


@torch.no_grad()
def reference(lm: LanguageModel, prompts: Sequence[Turns], labels: Sequence[str]) -> np.ndarray:
    """Every label after every prompt through a forward pass of its own: sums of log-probabilities [N, K]."""
    sums = np.zeros((len(prompts), len(labels)))
    for row, prompt in enumerate(prompts):
        for column, label in enumerate(labels):
            asked, message = lm.prompt_ids(prompt), lm.answer_ids(label)
            logits = lm.model(torch.tensor([asked + message])).logits[0].double().log_softmax(-1)
            sums[row, column] = sum(float(logits[len(asked) + i - 1, token]) for i, token in enumerate(message))
    return sums


def normalised(sums: np.ndarray) -> np.ndarray:
    return np.asarray(sums - np.logaddexp.reduce(sums, axis=1, keepdims=True))


def test_scores_are_those_of_a_forward_pass_a_label(tiny: LanguageModel) -> None:
    result = label_scores(tiny, PROMPTS, LABELS, tolerance=EXACT).log_probabilities
    assert result.dtype == np.float32
    assert result.shape == (len(PROMPTS), len(LABELS))
    np.testing.assert_allclose(result, normalised(reference(tiny, PROMPTS, LABELS)), atol=1e-4)


def test_scores_of_the_real_model(real: LanguageModel) -> None:
    labels = ["card_arrival", "card_linking", "card", "cash_withdrawal", "Paris", "lost_or_stolen_card"]
    prompts = [ask("The capital of France is"), ask("I still have not received my new card."), ask("Cash?")]
    result = label_scores(real, prompts, labels, tolerance=EXACT).log_probabilities
    np.testing.assert_allclose(result, normalised(reference(real, prompts, labels)), atol=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 64, 2048])
@pytest.mark.parametrize("wave_tokens", [1, 40, 6144])
def test_scores_do_not_depend_on_batches_or_order(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, batch_tokens: int, wave_tokens: int
) -> None:
    expected = normalised(reference(tiny, PROMPTS, LABELS))
    monkeypatch.setattr(likelihood, "_BATCH_TOKENS", batch_tokens)
    monkeypatch.setattr(label_tree, "_WAVE_TOKENS", wave_tokens)
    monkeypatch.setattr(label_tree, "_HEAD_ROWS", 3)
    rows, columns = np.random.default_rng(batch_tokens).permutation(6), np.random.default_rng(0).permutation(10)
    result = label_scores(tiny, [PROMPTS[row] for row in rows], [LABELS[column] for column in columns], tolerance=EXACT)
    np.testing.assert_allclose(result.log_probabilities, expected[rows][:, columns], atol=1e-4)


def test_prompts_of_one_length_alike_and_alone(tiny: LanguageModel) -> None:
    prompts = [ask("same"), ask("same"), ask("sane")]
    together = label_scores(tiny, prompts, LABELS).log_probabilities
    np.testing.assert_allclose(together[0], together[1], atol=1e-6)
    alone = np.concatenate([label_scores(tiny, [prompt], LABELS).log_probabilities for prompt in prompts])
    np.testing.assert_allclose(together, alone, atol=1e-4)
    np.testing.assert_allclose(np.exp(together).sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("labels", [["yes", "no"], ["a", "b"], ["", "a"], [chr(97 + i) for i in range(26)]])
def test_small_and_flat_label_sets(tiny: LanguageModel, labels: list[str]) -> None:
    result = label_scores(tiny, PROMPTS, labels).log_probabilities
    np.testing.assert_allclose(result, normalised(reference(tiny, PROMPTS, labels)), atol=1e-3)


def test_no_prompts(tiny: LanguageModel) -> None:
    result = label_scores(tiny, [], LABELS, embeddings=True)
    assert result.log_probabilities.shape == (0, len(LABELS))
    assert result.embeddings is not None
    assert result.embeddings.shape == prompt_embeddings(tiny, []).shape == (0, 96)


@pytest.mark.parametrize(("tolerance", "share"), [(0.9, 0.3), (0.1, 0.4), (1e-2, 0.5), (1e-4, 0.9)])
def test_labels_that_are_not_walked_hold_no_more_than_the_tolerance(
    trained: tuple[LanguageModel, dict[str, str]], monkeypatch: pytest.MonkeyPatch, tolerance: float, share: float
) -> None:
    lm, answers = trained
    labels = [f"{first}{second} {first}" for first in "abcdefgh" for second in "xyzuvw"]
    prompts = [ask(asked) for asked in answers] + PROMPTS
    walked: list[int] = []
    follow = label_tree._TreeWalker.follow

    def counted(walker: label_tree._TreeWalker, wave: dict[int, list[label_tree._Branch]]) -> None:
        walked.extend(len(due) for due in wave.values())
        follow(walker, wave)

    monkeypatch.setattr(label_tree._TreeWalker, "follow", counted)
    result = np.exp(label_scores(lm, prompts, labels, tolerance=tolerance).log_probabilities.astype(np.float64))
    exact = np.exp(normalised(reference(lm, prompts, labels)))
    assert (np.abs(result - exact).sum(axis=1) / 2 <= tolerance + 1e-4).all()
    assert [labels[column] for column in result[: len(answers)].argmax(axis=1)] == list(answers.values())
    walked.clear()
    label_scores(lm, prompts[: len(answers)], labels, tolerance=tolerance)
    everything = len(answers) * len(LabelTree([lm.answer_ids(label) for label in labels]).edges)
    assert 0 < sum(walked) < everything * share, "a model that knows the task leaves most branches alone"


def test_without_a_tolerance_the_work_is_the_same_for_every_model(
    trained: tuple[LanguageModel, dict[str, str]], tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A latency that hung on how sure a model is would decide gates by chance."""
    labels = [f"{first}{second} {first}" for first in "abcdefgh" for second in "xyzuvw"]
    shapes: list[list[torch.Size]] = []
    for lm in (trained[0], tiny):
        shapes.append([])
        forward = lm.decoder.forward

        def noted(*arguments: Any, forward: Any = forward, **options: Any) -> Any:
            shapes[-1].append(options["input_ids"].shape)
            return forward(*arguments, **options)

        monkeypatch.setattr(lm.decoder, "forward", noted)
        label_scores(lm, PROMPTS[:1], labels, tolerance=0)
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) > 1


def test_a_named_label_is_exact_however_improbable(trained: tuple[LanguageModel, dict[str, str]]) -> None:
    lm, answers = trained
    labels = [f"{first}{second} {first}" for first in "abcdefgh" for second in "xyzuvw"]
    prompts = [ask(asked) for asked in answers]
    expected = normalised(reference(lm, prompts, labels))
    worst = expected.argmin(axis=1)
    rows = np.arange(len(prompts))
    result = label_scores(lm, prompts, labels, tolerance=1e-3, exact=worst.tolist()).log_probabilities
    np.testing.assert_allclose(result[rows, worst], expected[rows, worst], atol=2e-3)
    guessed = label_scores(lm, prompts, labels, tolerance=1e-3).log_probabilities
    assert (np.abs(guessed[rows, worst] - expected[rows, worst]) > 0.1).any(), "the tolerance leaves some out"


def test_bfloat16_is_close(tiny_model: Path, tiny: LanguageModel) -> None:
    low = load_language_model(tiny_model, TaskConfig())
    assert low.model.dtype == torch.bfloat16
    result = label_scores(low, PROMPTS, LABELS).log_probabilities
    exact = normalised(reference(tiny, PROMPTS, LABELS))
    np.testing.assert_allclose(np.exp(result), np.exp(exact), atol=0.01)
    np.testing.assert_allclose(result[exact > -7], exact[exact > -7], atol=0.3)


def test_labels_that_are_one_to_the_model_are_refused(tiny: LanguageModel) -> None:
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
def test_other_families(family: Callable[..., LanguageModel], kind: str, settings: dict[str, object]) -> None:
    """Windows, caps, scales, learnt positions: whatever the family does, scores are those of its own forward."""
    lm = family(kind, **settings)
    labels = ["card", "card lost", "refund"]
    result = label_scores(lm, PROMPTS[:4], labels, tolerance=EXACT, embeddings=True)
    np.testing.assert_allclose(result.log_probabilities, normalised(reference(lm, PROMPTS[:4], labels)), atol=2e-4)
    np.testing.assert_allclose(result.embeddings, mean_states(lm, PROMPTS[:4]), atol=1e-4)


@torch.no_grad()
def mean_states(lm: LanguageModel, prompts: Sequence[Turns]) -> np.ndarray:
    """Means of the last hidden states over the tokens from the user's words on, one prompt at a time."""
    means = []
    for prompt in prompts:
        ids = lm.prompt_ids(prompt)
        states = lm.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        start = len(lm.tokenizer("<|user|>", add_special_tokens=False)["input_ids"])
        means.append(states[start:].mean(0))
    return torch.stack(means).numpy()


def test_embeddings_do_not_depend_on_the_prompts_beside(tiny: LanguageModel) -> None:
    """Those of hard cases are compared with those of the pool, which another call made."""
    prompts = [ask(text) for text in ("my card is gone", "my card is lost", "my card", "hello")]
    together = prompt_embeddings(tiny, prompts)
    np.testing.assert_allclose(prompt_embeddings(tiny, prompts[:2]), together[:2], atol=1e-5)
    for row, prompt in enumerate(prompts):
        np.testing.assert_allclose(prompt_embeddings(tiny, [prompt])[0], together[row], atol=1e-5)
    np.testing.assert_allclose(prompt_embeddings(tiny, [prompts[0]] * 3), together[[0, 0, 0]], atol=1e-5)


def test_embeddings_are_mean_hidden_states(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mean_states(tiny, PROMPTS)
    for batch_tokens in (1, 50, 2048):
        monkeypatch.setattr(likelihood, "_BATCH_TOKENS", batch_tokens)
        np.testing.assert_allclose(prompt_embeddings(tiny, PROMPTS), expected, atol=1e-4)
    scored = label_scores(tiny, PROMPTS, LABELS, embeddings=True).embeddings
    np.testing.assert_array_equal(scored, prompt_embeddings(tiny, PROMPTS))
    assert label_scores(tiny, PROMPTS, LABELS).embeddings is None


def test_answers_of_any_kind(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["yes", "", "a longer answer, with words", "no", "x\ny", "ö"]
    expected = np.diagonal(reference(tiny, PROMPTS, answers))
    for batch_tokens in (1, 2048):
        monkeypatch.setattr(likelihood, "_BATCH_TOKENS", batch_tokens)
        sums, counts = answer_log_likelihoods(tiny, PROMPTS, answers)
        assert (sums.dtype, counts.dtype) == (np.float64, np.int64)
        np.testing.assert_allclose(sums, expected, atol=1e-3)
        assert counts.tolist() == [len(tiny.answer_ids(answer)) for answer in answers]


def test_every_assistant_turn_counts_in_a_conversation(tiny: LanguageModel) -> None:
    turns = [*ask("one"), {"role": "assistant", "content": "two"}, *ask("three")]
    sums, counts = answer_log_likelihoods(tiny, [turns], ["four"])
    parts = reference(tiny, [turns[:1]], ["two"])[0, 0] + reference(tiny, [turns], ["four"])[0, 0]
    assert sums[0] == pytest.approx(parts, abs=1e-3)
    assert counts[0] == len("two") + len("four") + 2


def test_no_answers(tiny: LanguageModel) -> None:
    sums, counts = answer_log_likelihoods(tiny, [], [])
    assert sums.shape == counts.shape == (0,)
