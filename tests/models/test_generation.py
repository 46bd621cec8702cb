from collections.abc import Callable

import pytest
import torch

from posttrain.models import generate as generate_module
from posttrain.models.chat import ChatTemplate
from posttrain.models.generate import generate
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import Turns

Trained = tuple[LanguageModel, dict[str, str]]


def ask(text: str) -> Turns:
    return [{"role": "user", "content": text}]


@torch.no_grad()
def greedy_answer(lm: LanguageModel, prompt: Turns, limit: int) -> tuple[str, bool]:
    """The most probable next token of a plain forward pass, repeated."""
    prompt_ids = lm.prompt_ids(prompt)
    answer_ids: list[int] = []
    while len(answer_ids) < limit:
        token = int(lm.model(torch.tensor([prompt_ids + answer_ids])).logits[0, -1].argmax())
        if token in lm.chat.stop_ids:
            return lm.tokenizer.decode(answer_ids, skip_special_tokens=True).strip(), True
        answer_ids.append(token)
    return lm.tokenizer.decode(answer_ids, skip_special_tokens=True).strip(), False


@pytest.mark.slow
@pytest.mark.parametrize("batch_tokens", [1, 120])
def test_answers_are_greedy_whatever_the_batch(
    trained_model: Trained, monkeypatch: pytest.MonkeyPatch, batch_tokens: int
) -> None:
    lm, answers = trained_model
    prompts = [ask(text) for text in [*answers, "never seen before", "a question that is longer " * 3]]
    monkeypatch.setattr(generate_module, "_BATCH_TOKENS", batch_tokens)
    result = generate(lm, prompts)
    assert [(answer.text, answer.finished) for answer in result] == [
        greedy_answer(lm, prompt, lm.task.max_new_tokens) for prompt in prompts
    ]
    assert [answer.text for answer in result[: len(answers)]] == list(answers.values())
    assert all(answer.finished for answer in result[: len(answers)])


def test_the_longest_prompt_limits_the_batch_size(trained_model: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, _ = trained_model
    shapes = []
    answer = generate_module._answer

    def record_shape(
        lm: LanguageModel, prompts: list[list[int]], limit: int, log_probabilities: bool
    ) -> list[generate_module.Generation]:
        shapes.append((len(prompts), max(map(len, prompts)) + limit))
        return answer(lm, prompts, limit, log_probabilities)

    monkeypatch.setattr(generate_module, "_answer", record_shape)
    monkeypatch.setattr(generate_module, "_BATCH_TOKENS", 200)
    prompts = [ask("x" * length) for length in (1, 1, 1, 90, 2, 300)]
    assert len(generate(lm, prompts, max_new_tokens=2)) == 6
    assert sum(rows for rows, _ in shapes) == 6
    assert all(rows == 1 or rows * width <= 200 for rows, width in shapes)
    assert len(shapes) < 6


def test_a_truncated_answer_is_marked_unfinished(trained_model: Trained) -> None:
    lm, answers = trained_model
    prompt, answer = next(iter(answers.items()))
    truncated, complete = (generate(lm, [ask(prompt)], max_new_tokens=limit)[0] for limit in (2, len(answer) + 1))
    assert (truncated.text, truncated.finished) == (answer[:2].strip(), False)
    assert (complete.text, complete.finished) == (answer, True)


@pytest.mark.parametrize(
    ("key", "value"), [("do_sample", True), ("repetition_penalty", 9.0), ("no_repeat_ngram_size", 1), ("num_beams", 3)]
)
def test_decoding_ignores_the_models_generation_config(
    trained_model: Trained, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    lm, answers = trained_model
    prompts = [ask(text) for text in [*answers, "never seen before", "nor this"]]
    expected = [greedy_answer(lm, prompt, 8)[0] for prompt in prompts]
    for name, setting in {key: value, "temperature": 5.0, "top_k": 0}.items():
        monkeypatch.setattr(lm.model.generation_config, name, setting)
    assert [answer.text for answer in generate(lm, prompts, 8)] == expected


def test_no_prompts_give_no_answers(tiny: LanguageModel) -> None:
    assert generate(tiny, []) == []


def test_every_stop_token_ends_an_answer(trained_model: Trained) -> None:
    lm, answers = trained_model
    space = lm.tokenizer(" ")["input_ids"][0]
    other = LanguageModel(lm.model, lm.tokenizer, lm.task)
    other.chat = ChatTemplate(lm.tokenizer, lm.chat.stop_ids | {space})
    result = generate(other, [ask(text) for text in answers])
    assert [(answer.text, answer.finished) for answer in result] == [
        (answer.split(" ")[0], True) for answer in answers.values()
    ]


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "qwen2"])
def test_answers_of_other_families_are_greedy(family: Callable[..., LanguageModel], kind: str) -> None:
    lm = family(kind, **({"head_dim": 32, "sliding_window": 8} if kind == "gemma2" else {}))
    prompts = [ask("short"), ask("a longer question than the other"), ask("")]
    result = [(answer.text, answer.finished) for answer in generate(lm, prompts, max_new_tokens=4)]
    assert result == [greedy_answer(lm, prompt, 4) for prompt in prompts]


def test_the_real_model_knows_the_capital_of_france(real: LanguageModel) -> None:
    prompts = [ask("What is the capital of France?"), ask("Say hello.")]
    answer = generate(real, prompts)[0]
    assert (answer.text, answer.finished) == ("The capital of France is Paris.", True)


@pytest.mark.slow
def test_the_mean_log_probability_is_that_of_the_tokens_written(trained_model: Trained) -> None:
    lm, answers = trained_model
    prompts = [ask(text) for text in [*answers, "never seen before"]]
    result = generate(lm, prompts, log_probabilities=True)
    assert result == generate(lm, prompts)
    for prompt, answer in zip(prompts, result, strict=True):
        ids, logs = lm.prompt_ids(prompt), []
        for _ in range(answer.tokens):
            with torch.no_grad():
                row = lm.model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
            logs.append(float(row.max()))
            ids = [*ids, int(row.argmax())]
        assert answer.finished == (ids[-1] in lm.chat.stop_ids)
        assert answer.log_probability == pytest.approx(sum(logs) / len(logs), abs=1e-5)
        if answer.finished:
            assert answer.tokens == len(lm.answer_ids(answer.text))
