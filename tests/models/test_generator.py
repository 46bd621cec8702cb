from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.models import generator as generator_module
from posttrain.models.chat import ChatTemplate
from posttrain.models.generator import LocalGenerator, Request, Sampling, greedy_answers
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
    monkeypatch.setattr(generator_module, "_BATCH_TOKENS", batch_tokens)
    result = greedy_answers(lm, prompts)
    assert [(answer.text, answer.finished) for answer in result] == [
        greedy_answer(lm, prompt, lm.task.max_new_tokens) for prompt in prompts
    ]
    assert [answer.text for answer in result[: len(answers)]] == list(answers.values())
    assert all(answer.finished for answer in result[: len(answers)])


@pytest.mark.parametrize("longest", [2, 40])
def test_the_longest_prompt_and_answer_limit_the_batch_size(
    trained_model: Trained, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    lm, _ = trained_model
    shapes = []
    generate = lm.model.generate

    def record_shape(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        shapes.append((len(input_ids), input_ids.shape[1] + longest))
        result: torch.Tensor = generate(input_ids=input_ids, **options)
        return result

    monkeypatch.setattr(lm.model, "generate", record_shape)
    monkeypatch.setattr(generator_module, "_BATCH_TOKENS", 200)
    prompts = [ask("x" * length) for length in (*[1] * 20, 90, 2, 300)]
    assert len(greedy_answers(lm, prompts, max_new_tokens=longest)) == len(prompts)
    assert sum(rows for rows, _ in shapes) == len(prompts)
    assert all(rows == 1 or rows * width <= 200 for rows, width in shapes)
    assert len(shapes) < len(prompts)


def test_a_truncated_answer_is_marked_unfinished(trained_model: Trained) -> None:
    lm, answers = trained_model
    prompt, answer = next(iter(answers.items()))
    truncated, complete = (greedy_answers(lm, [ask(prompt)], max_new_tokens=limit)[0] for limit in (2, len(answer) + 1))
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
    assert [answer.text for answer in greedy_answers(lm, prompts, 8)] == expected


def test_no_prompts_give_no_answers(tiny: LanguageModel) -> None:
    assert greedy_answers(tiny, []) == []


def test_every_stop_token_ends_an_answer(trained_model: Trained) -> None:
    lm, answers = trained_model
    space = lm.tokenizer(" ")["input_ids"][0]
    other = LanguageModel(lm.model, lm.tokenizer, lm.task)
    other.chat = ChatTemplate(lm.tokenizer, lm.chat.stop_ids | {space})
    result = greedy_answers(other, [ask(text) for text in answers])
    assert [(answer.text, answer.finished) for answer in result] == [
        (answer.split(" ")[0], True) for answer in answers.values()
    ]


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "qwen2"])
def test_answers_of_other_families_are_greedy(family: Callable[..., LanguageModel], kind: str) -> None:
    lm = family(kind, **({"head_dim": 32, "sliding_window": 8} if kind == "gemma2" else {}))
    prompts = [ask("short"), ask("a longer question than the other"), ask("")]
    result = [(answer.text, answer.finished) for answer in greedy_answers(lm, prompts, max_new_tokens=4)]
    assert result == [greedy_answer(lm, prompt, 4) for prompt in prompts]


def test_the_real_model_knows_the_capital_of_france(real: LanguageModel) -> None:
    prompts = [ask("What is the capital of France?"), ask("Say hello.")]
    answer = greedy_answers(real, prompts)[0]
    assert (answer.text, answer.finished) == ("The capital of France is Paris.", True)


def own_logits(lm: LanguageModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits of the next token after the ids, float64 [V]."""
    with torch.no_grad():
        result: torch.Tensor = lm.model(torch.tensor([list(ids)])).logits[0, -1].double()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probabilities_are_the_models_of_the_tokens_written(trained_model: Trained, temperature: float) -> None:
    lm, answers = trained_model
    prompts = [ask(text) for text in [*answers, "never seen before"]]
    sampling = Sampling(temperature=temperature, top_p=0.9, seed=3)
    recorded = replace(sampling, log_probabilities=True)
    result = LocalGenerator(lm).generate([Request(prompt, recorded) for prompt in prompts])
    plain = LocalGenerator(lm).generate([Request(prompt, sampling) for prompt in prompts])
    assert [answer.ids for answer in result] == [answer.ids for answer in plain]
    assert {answer.log_probabilities for answer in plain} == {None}
    for prompt, answer in zip(prompts, result, strict=True):
        ids, logs = lm.prompt_ids(prompt), []
        for token in answer.ids:
            logs.append(float(own_logits(lm, ids).log_softmax(-1)[token]))
            ids = [*ids, token]
        assert answer.log_probabilities == pytest.approx(logs, abs=1e-4)
        assert answer.mean_log_probability == pytest.approx(sum(logs) / len(logs), abs=1e-4)
        assert answer.finished == (ids[-1] in lm.chat.stop_ids)
        if answer.finished and not temperature:
            assert answer.ids == tuple(lm.answer_ids(answer.text))


@pytest.mark.slow
def test_samples_follow_the_nucleus_of_the_models_distribution(tiny: LanguageModel) -> None:
    from scipy.stats import chisquare

    prompt, draws = tiny.prompt_ids(ask("hi")), 3000
    for temperature, top_p in ((1.0, 1.0), (0.5, 0.8)):
        requests = [Request(prompt, Sampling(1, temperature, top_p, seed)) for seed in range(draws)]
        tokens = [answer.ids[0] for answer in LocalGenerator(tiny).generate(requests)]
        p, order = (own_logits(tiny, prompt) / temperature).softmax(-1).sort(descending=True)
        nucleus = torch.zeros_like(p)
        kept = p.cumsum(-1) - p < top_p
        nucleus[order[kept]] = p[kept] / p[kept].sum()
        expected = draws * nucleus.numpy()
        assert not np.bincount(tokens, minlength=len(expected))[expected == 0].any()
        frequent = expected >= 5
        counts = np.bincount(tokens, minlength=len(expected))
        observed = np.append(counts[frequent], counts[~frequent].sum())
        wanted = np.append(expected[frequent], expected[~frequent].sum())
        observed, wanted = observed[wanted > 0], wanted[wanted > 0]
        assert chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


def test_an_answer_depends_on_its_request_and_not_on_its_batch(tiny: LanguageModel) -> None:
    texts = ["one", "another, longer question", "a third", "one"]
    requests = [Request(ask(text), Sampling(6, 1.0, 0.95, seed)) for seed, text in enumerate(texts)]
    requests.append(Request(ask("greedy beside them"), Sampling(3)))
    together = [answer.ids for answer in LocalGenerator(tiny).generate(requests)]
    assert together == [LocalGenerator(tiny).generate([request])[0].ids for request in requests]
    assert together[0] != together[3], "another seed"
    assert len(together[4]) <= 3
    assert together[4] == greedy_answers(tiny, [ask("greedy beside them")], 3)[0].ids
    assert (
        LocalGenerator(tiny).generate([Request(tiny.prompt_ids(ask("one")), requests[0].sampling)])[0].ids
        == together[0]
    )


def test_an_answer_ends_with_its_last_line(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    newline = tiny.tokenizer("\n", add_special_tokens=False)["input_ids"]
    word = tiny.tokenizer("word", add_special_tokens=False)["input_ids"]
    stop = min(tiny.chat.stop_ids)
    written = [(word + newline) * 4 + word, word + newline + [stop] + word * 9, word * 8]

    def write(input_ids: torch.Tensor, stopping_criteria: Any, **_: Any) -> torch.Tensor:
        width = min(map(len, written))
        output = torch.cat([input_ids, torch.tensor([row[:width] for row in written])], 1)
        for end in range(input_ids.shape[1] + 1, output.shape[1] + 1):
            stopping_criteria[0](output[:, :end], output)
        return output

    monkeypatch.setattr(tiny.model, "generate", write)
    requests = [Request(ask("x"), Sampling(99, lines=lines)) for lines in (2, 2, None)]
    result = LocalGenerator(tiny).generate(requests)
    assert [answer.finish for answer in result] == ["lines", "stop", "length"]
    assert result[0].ids == tuple((word + newline) * 2)
    assert result[1].ids == (*word, *newline, stop)
