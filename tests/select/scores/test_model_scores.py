"""Scores that run a model, against the model's own token probabilities."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy.stats import chisquare

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import label_scores
from posttrain.models.task import TaskConfig
from posttrain.select.scores.answers import (
    answer_group,
    likelihood_group,
    perplexity_group,
    stated_confidence,
    surprisal,
    verbalised_group,
)
from posttrain.select.scores.labelled import instruction_difficulty_group
from posttrain.select.scores.labels import dropout_group
from posttrain.select.scores.model_passes import (
    dropout_mask,
    encode_answer,
    loss_and_gradient_norm,
    mean_token_entropies,
    sample_answers,
)
from posttrain.select.scores.passes import ScoreGroup, ScoringInput, ScoringModel, to_matrix
from posttrain.select.scores.sampled_answers import sample_group
from posttrain.select.scores.semantic_entropy import embedding_cluster_group, entailment_cluster_group

LABELS = ["card lost", "card stolen", "refund", "top up"]


@pytest.fixture(scope="module")
def lm(tiny_model: Path) -> LanguageModel:
    return load_language_model(tiny_model, TaskConfig(max_new_tokens=3), dtype="float32")


def scoring_inputs(*texts: str, answers: tuple[str, ...] = ()) -> list[ScoringInput]:
    return [ScoringInput([{"role": "user", "content": text}], answers) for text in texts]


def logits_after(lm: LanguageModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = lm.model(input_ids=torch.tensor([ids])).logits[0].double()
    return result


def test_token_entropy_is_the_mean_entropy_of_the_full_distribution(lm: LanguageModel) -> None:
    records = [
        *scoring_inputs("hello", answers=("a",)),
        *scoring_inputs("what a long question this is", answers=("blue sky",)),
    ]
    result = mean_token_entropies(lm, [encode_answer(lm, item) for item in records])
    for value, item in zip(result, records, strict=True):
        before, answer = lm.prompt_ids(item.prompt), lm.answer_ids(item.answers[0])
        logs = logits_after(lm, before + answer).log_softmax(-1)[len(before) - 1 : -1]
        assert value == pytest.approx(float(-(logs.exp() * logs).sum(-1).mean()), rel=1e-4)


@pytest.mark.parametrize("scale", [None, 0.5], ids=["plain logits", "scaled logits"])
def test_gradient_norm_is_that_of_the_output_layer(tiny_model: Path, scale: float | None) -> None:
    lm = load_language_model(tiny_model, TaskConfig(), dtype="float32")
    lm.model.config.logit_scale = scale  # as Cohere's models have one
    record = scoring_inputs("my card", answers=("refund",))[0]
    sequence = encode_answer(lm, record)
    loss, norm = loss_and_gradient_norm(lm, sequence)
    before = len(lm.prompt_ids(record.prompt))
    ids = torch.tensor([sequence.ids])
    hidden = lm.decoder(input_ids=ids).last_hidden_state[0, before - 1 : -1].detach()
    weight = lm.model.get_output_embeddings().weight.detach().clone().requires_grad_()
    direct = torch.nn.functional.cross_entropy((scale or 1.0) * hidden @ weight.T, ids[0, before:])
    direct.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert loss == pytest.approx(float(direct.detach()), rel=1e-5)
    assert norm == pytest.approx(float(weight.grad.norm()), rel=1e-4)
    assert all(item.grad is None for item in lm.model.parameters())


@pytest.mark.slow
def test_samples_follow_the_models_distribution(lm: LanguageModel) -> None:
    one_token = LanguageModel(lm.model, lm.tokenizer, TaskConfig(max_new_tokens=1))
    record = scoring_inputs("hi")
    for temperature in (1.0, 0.5):
        samples = sample_answers(one_token, record, 3000, temperature, seed=1)[0]
        counts = np.bincount([ids[0] for ids in samples], minlength=len(lm.tokenizer))
        logits = logits_after(lm, lm.prompt_ids(record[0].prompt))[-1] / temperature
        expected = 3000 * logits.softmax(-1).numpy()
        frequent = expected >= 5
        observed = np.append(counts[frequent], counts[~frequent].sum())
        expected_counts = np.append(expected[frequent], expected[~frequent].sum())
        assert chisquare(observed, expected_counts * observed.sum() / expected_counts.sum()).pvalue > 1e-4


def test_samples_depend_on_the_record_and_not_on_its_batch(lm: LanguageModel) -> None:
    records = scoring_inputs("one", "another, longer question", "a third")
    batch_samples = sample_answers(lm, records, 4, 1.0, seed=5)
    assert batch_samples == [sample_answers(lm, [item], 4, 1.0, seed=5)[0] for item in records]
    assert batch_samples != sample_answers(lm, records, 4, 1.0, seed=6)
    assert len({tuple(ids) for ids in batch_samples[0]}) > 1


def test_sampled_answers_have_their_log_probabilities(lm: LanguageModel) -> None:
    records = scoring_inputs("one", "two or three")
    table = sample_group(3, 1.0, 0).score(lm, records)
    samples = sample_answers(lm, records, 3, 1.0, 0)
    for row, item in enumerate(records):
        before = lm.prompt_ids(item.prompt)
        for position, ids in enumerate(samples[row]):
            logs = logits_after(lm, before + ids).log_softmax(-1)[len(before) - 1 : -1]
            direct = float(logs.gather(1, torch.tensor(ids)[:, None]).sum())
            assert table["log_probabilities"][row].as_py()[position] == pytest.approx(direct, rel=1e-4)
            assert table["tokens"][row].as_py()[position] == len(ids)


def test_a_dropout_mask_is_reproducible_and_does_not_change_the_model(lm: LanguageModel) -> None:
    prompts = [item.prompt for item in scoring_inputs("one", "two")]

    def scores() -> np.ndarray:
        return label_scores(lm, prompts, LABELS, tolerance=0).log_probabilities

    whole = scores()
    with dropout_mask(lm, 0.3, seed=1, number=0):
        first = scores()
    with dropout_mask(lm, 0.3, seed=1, number=1):
        second = scores()
    with dropout_mask(lm, 0.3, seed=1, number=0):
        again = scores()
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(whole, scores())
    assert np.abs(first - second).max() > 1e-3
    assert np.abs(first - whole).max() > 1e-3


def test_masks_drop_a_share_of_inputs_and_keep_the_mean(lm: LanguageModel) -> None:
    layer = next(item for item in lm.decoder.modules() if isinstance(item, torch.nn.Linear))
    layer_inputs: list[torch.Tensor] = []
    with dropout_mask(lm, 0.25, seed=0, number=0):
        handle = layer.register_forward_pre_hook(lambda module, inputs: layer_inputs.append(inputs[0]))
        layer(torch.ones(1, layer.in_features))
        handle.remove()
    assert sorted(layer_inputs[0].unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
    assert float((layer_inputs[0] == 0).float().mean()) == pytest.approx(0.25, abs=0.15)


def test_dropout_passes_equal_those_of_the_masks(lm: LanguageModel) -> None:
    records = scoring_inputs("one", "two")
    table = dropout_group(LABELS, 3, 0.2, 7).score(lm, records)
    result = to_matrix(table, "log_probabilities").reshape(2, 3, 4)
    with dropout_mask(lm, 0.2, 7, 2):
        direct = label_scores(lm, [item.prompt for item in records], LABELS, tolerance=1e-3).log_probabilities
    np.testing.assert_array_equal(result[:, 2], direct)


def test_the_likelihood_of_the_greedy_answer_equals_that_of_its_generation(lm: LanguageModel) -> None:
    greedy = answer_group().score(lm, scoring_inputs("one", "two"))
    greedy_answers = [
        ScoringInput(first.prompt, (answer,))
        for first, answer in zip(scoring_inputs("one", "two"), greedy["predicted"].to_pylist(), strict=True)
    ]
    assert likelihood_group().score(lm, greedy_answers).equals(greedy.select(["log_probability", "tokens"]))
    result = surprisal(greedy)
    np.testing.assert_allclose(result * greedy["tokens"].to_numpy(), -greedy["log_probability"].to_numpy(), rtol=1e-12)


def test_instruction_difficulty_is_the_ratio_of_perplexities(lm: LanguageModel) -> None:
    records = [*scoring_inputs("one", answers=("refund",)), *scoring_inputs("two", answers=("top up",))]
    result = instruction_difficulty_group().score(lm, records)["instruction_difficulty"].to_numpy()
    for value, item in zip(result, records, strict=True):
        with_prompt, without_prompt = (
            torch.tensor([before + lm.answer_ids(item.answers[0])])
            for before in (lm.prompt_ids(item.prompt), [lm.tokenizer.bos_token_id or min(lm.chat.stop_ids)])
        )
        count = len(lm.answer_ids(item.answers[0]))
        with torch.inference_mode():
            logs = [
                lm.model(ids).logits[0, -count - 1 : -1].float().log_softmax(-1)
                for ids in (with_prompt, without_prompt)
            ]
        means = [float(item.gather(1, with_prompt[0, -count:, None]).mean()) for item in logs]
        assert value == pytest.approx(math.exp(means[1] - means[0]), rel=1e-4)


def test_perplexity_is_of_the_text_without_the_template(lm: LanguageModel) -> None:
    result = perplexity_group().score(lm, scoring_inputs("blue sky", "a"))["perplexity"].to_pylist()
    ids = lm.tokenizer("blue sky")["input_ids"]
    logs = logits_after(lm, ids).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    assert result[0] == pytest.approx(math.exp(-float(logs.mean())), rel=1e-4)
    assert math.isnan(result[1])  # one token, which nothing predicts


def test_only_a_number_is_a_confidence() -> None:
    confidences = {"80": 0.8, " 100% ": 1.0, "0": 0.0, "7.": 0.07}
    assert {reply: stated_confidence(reply) for reply in confidences} == confidences
    for reply in ("", "101", "-5", "80 or so", "eighty", "8 0", "80/100", "0.8", "I am 90% sure", "1000"):
        assert math.isnan(stated_confidence(reply)), reply


def test_the_question_of_confidence_follows_the_answer(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.models import generate

    conversations = []

    def reply(lm: LanguageModel, prompts: list[list[dict[str, str]]]) -> list[generate.Generation]:
        conversations.extend(lm.task.turns(prompt) for prompt in prompts)
        return [generate.Generation("75%", True), generate.Generation("quite", True)]

    monkeypatch.setattr(generate, "generate", reply)
    with_template = LanguageModel(lm.model, lm.tokenizer, TaskConfig(system="Be brief.", template="Say: {prompt}"))
    result = verbalised_group().score(with_template, scoring_inputs("one", "two", answers=("red",)))
    assert result["verbalised_confidence"].to_pylist()[0] == 0.75
    assert math.isnan(result["verbalised_confidence"].to_pylist()[1])
    assert [turn["content"] for turn in conversations[0][:3]] == ["Be brief.", "Say: one", "red"]
    assert conversations[0][3]["content"].startswith("How likely is it")


def test_answers_group_by_entailment_in_both_directions(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.models import likelihood

    # "a big dog" entails "a dog" but not the other way round: their meanings differ.
    entailed = {("a dog", "one dog"), ("one dog", "a dog"), ("a big dog", "a dog"), ("a big dog", "one dog")}

    def entailment_scores(lm: LanguageModel, prompts: list[list[dict[str, str]]], labels: tuple[str, ...]) -> object:
        rows = []
        for prompt in prompts:
            text = prompt[0]["content"]
            assert "Question: what is it?" in text
            pair = tuple(text.split(f"{which} answer: ")[1].split("\n")[0] for which in ("First", "Second"))
            rows.append([0.0, -9.0, -9.0] if pair in entailed else [-9.0, 0.0, -9.0])
        return likelihood.LabelScores(np.array(rows, np.float32), None)

    monkeypatch.setattr(likelihood, "label_scores", entailment_scores)
    answers = ("A dog", "a big dog", "one dog", "a  DOG")
    table = entailment_cluster_group().score(lm, scoring_inputs("what is it?", answers=answers))
    assert table["groups"].to_pylist() == [[0, 1, 0, 0]]


def test_the_judge_decides_entailment(lm: LanguageModel) -> None:
    judge = ScoringModel("a judge", TaskConfig(), lambda: lm)
    records = scoring_inputs("what is it?", "and this?", answers=("a dog", "a cat"))
    own, judged = (group.score(lm, records) for group in (entailment_cluster_group(), entailment_cluster_group(judge)))
    assert own.equals(judged)
    assert {len(groups) for groups in own["groups"].to_pylist()} == {2}
    assert entailment_cluster_group().settings != entailment_cluster_group(judge).settings


def test_answers_with_similar_embeddings_are_one_group(lm: LanguageModel) -> None:
    answers = ("The card was stolen.", "My card has been stolen", "the card was  STOLEN.", "It rains in Paris")
    table = embedding_cluster_group("minilm", 0.7).score(lm, scoring_inputs("what?", answers=answers))
    assert table["groups"].to_pylist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize(
    "group",
    [
        answer_group(),
        dropout_group(LABELS, 2, 0.1, 0),
        sample_group(2, 1.0, 0),
        perplexity_group(),
        verbalised_group(),
        entailment_cluster_group(),
    ],
    ids=lambda group: group.name,
)
def test_without_records_the_table_has_the_columns(lm: LanguageModel, group: ScoreGroup) -> None:
    empty = group.score(lm, [])
    assert isinstance(empty, pa.Table)
    assert empty.num_rows == 0
    assert empty.num_columns >= 1
