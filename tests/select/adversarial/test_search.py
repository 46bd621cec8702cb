"""The search over records: which it tries, which examples it keeps, and its counts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from posttrain.models.generator import greedy_answers
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import answer_log_likelihoods, label_scores
from posttrain.models.task import TaskConfig, Turns
from posttrain.select.adversarial.examples import (
    JudgedAnswers,
    LabelledPrompt,
    SearchOutcome,
    SearchSettings,
    to_json_row,
)
from posttrain.select.adversarial.search import ATTACKS, search
from posttrain.store.errors import UserError

WORDS = ["card", "cash", "loan", "rate", "late", "high", "lost", "blue"]


def character_overlap(text: str, others: Sequence[str]) -> np.ndarray:
    return np.array([sum(a == b for a, b in zip(text, other, strict=True)) / len(text) for other in others])


class Judge:
    """Answers with the model; an answer equal to the record's completion is right."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm

    def answers(self, prompts: Sequence[Turns]) -> list[str]:
        labels = self.lm.task.label_set
        return [labels[row] for row in label_scores(self.lm, prompts, labels).log_probabilities.argmax(1)]

    def __call__(self, records: Sequence[LabelledPrompt], prompts: Sequence[Turns]) -> JudgedAnswers:
        answers = self.answers(prompts)
        return JudgedAnswers(
            answers, [example == record.completion for example, record in zip(answers, records, strict=True)]
        )


def records_of(lm: LanguageModel, wrong: int = 0) -> list[LabelledPrompt]:
    """16 records with the model's own answers; the first ``wrong`` have another label."""
    texts = [f"my {first} is {other}" for first in WORDS[:4] for other in WORDS[4:]]
    prompts: list[Turns] = [[{"role": "user", "content": text}] for text in texts]
    answers = Judge(lm).answers(prompts)
    labels = lm.task.label_set
    for row in range(wrong):
        answers[row] = next(label for label in labels if label != answers[row])
    return [LabelledPrompt(f"r{row}", *example) for row, example in enumerate(zip(prompts, answers, strict=True))]


@pytest.mark.slow
@pytest.mark.parametrize("method", ATTACKS)
def test_examples_are_the_rewritings_whose_answer_changes(labeller: LanguageModel, method: str) -> None:
    records, judge = records_of(labeller, wrong=4), Judge(labeller)
    settings = SearchSettings(n=2, method=method, similarity=0.7, swaps=4, budget=4000)
    outcome = search(labeller, records, judge, character_overlap, settings)
    assert outcome.examples
    by_id = {record.id: record for record in records}
    for example in outcome.examples:
        original = by_id[example.original]
        assert int(example.original[1:]) >= 4
        assert example.answer_before == original.completion == example.completion
        assert judge.answers([example.prompt]) == [example.answer] != [example.answer_before]
        assert example.prompt == [{"role": "user", "content": example.text}]
        assert character_overlap(example.text_before, [example.text])[0] == example.similarity >= 0.7
        assert sum(a != b for a, b in zip(example.text_before, example.text, strict=True)) == example.swaps <= 4
        assert example.loss > example.loss_before
        column = labeller.task.label_set.index(example.completion)
        scores = label_scores(labeller, [original.prompt, example.prompt], labeller.task.label_set, tolerance=0)
        np.testing.assert_allclose(-scores.log_probabilities[:, column], [example.loss_before, example.loss], atol=1e-4)
    counts = outcome.counts
    assert counts["records"] == counts["wrong"] + counts["no_words"] + counts["tried"]
    assert counts["tried"] == sum(counts[name] for name in ("unchanged", "out_of_budget", "unconfirmed", "kept"))
    assert counts["kept"] == len(outcome.examples) <= 2


def run_search(lm: LanguageModel, records: list[LabelledPrompt], **settings: int) -> SearchOutcome:
    return search(
        lm, records, Judge(lm), character_overlap, SearchSettings(**{"n": 3, "swaps": 4, "budget": 1000, **settings})
    )


@pytest.mark.slow
def test_the_result_depends_on_the_seed_and_not_on_the_order(labeller: LanguageModel) -> None:
    records = records_of(labeller)
    first = run_search(labeller, records, n=1)
    again = run_search(labeller, records[::-1], n=1)
    assert first.examples
    assert (again.examples, again.counts, again.passes) == (first.examples, first.counts, first.passes)
    assert run_search(labeller, records, n=1, seed=1).examples != first.examples


@pytest.mark.slow
def test_the_budget_ends_the_search(labeller: LanguageModel) -> None:
    outcome = run_search(labeller, records_of(labeller), budget=60)
    assert outcome.passes <= 60 + 2 * (outcome.counts["kept"] + outcome.counts["unconfirmed"])
    assert outcome.counts["out_of_budget"] >= 1
    assert run_search(labeller, records_of(labeller), budget=1).counts["records"] == 0


@pytest.mark.slow
def test_an_example_that_the_final_check_does_not_confirm_is_dropped(labeller: LanguageModel) -> None:
    class UnconfirmingJudge(Judge):
        """Answers wrongly during the search, but rightly in the final check."""

        def __call__(self, records: Sequence[LabelledPrompt], prompts: Sequence[Turns]) -> JudgedAnswers:
            judged = super().__call__(records, prompts)
            if len({record.id for record in records}) == len(records) == 2:  # the final check
                return JudgedAnswers([record.completion for record in records], [True, True])
            return judged

    settings = SearchSettings(n=2, similarity=0.7, swaps=4, budget=4000)
    outcome = search(labeller, records_of(labeller), UnconfirmingJudge(labeller), character_overlap, settings)
    assert (outcome.counts["unconfirmed"], outcome.counts["kept"], outcome.examples) == (2, 0, [])


@pytest.mark.parametrize("method", ATTACKS)
def test_the_search_works_on_written_answers(tiny_model: Path, method: str) -> None:
    lm = load_language_model(tiny_model, TaskConfig(max_new_tokens=4), dtype="float32")

    def answers(prompts: Sequence[Turns]) -> list[str]:
        return [example.text for example in greedy_answers(lm, prompts)]

    def judge(records: Sequence[LabelledPrompt], prompts: Sequence[Turns]) -> JudgedAnswers:
        texts = answers(prompts)
        return JudgedAnswers(texts, [text == record.completion for text, record in zip(texts, records, strict=True)])

    prompts: list[Turns] = [[{"role": "user", "content": f"my {word} is late"}] for word in WORDS[:3]]
    records = [LabelledPrompt(answer, prompt, answer) for answer, prompt in zip(answers(prompts), prompts, strict=True)]
    outcome = search(
        lm, records, judge, character_overlap, SearchSettings(n=1, method=method, similarity=0.5, swaps=4, budget=600)
    )
    [example] = outcome.examples
    assert answers([example.prompt]) == [example.answer] != [example.answer_before]
    sums, _ = answer_log_likelihoods(lm, [example.prompt], [example.answer_before])
    assert example.loss == pytest.approx(-sums[0], abs=1e-3)


def test_records_without_right_answers_and_unknown_methods_are_refused(labeller: LanguageModel) -> None:
    records = records_of(labeller, wrong=16)
    with pytest.raises(UserError, match="the champion answers none of 16 records rightly"):
        run_search(labeller, records)
    with pytest.raises(UserError, match=r"^--method: no method `fgms`; did you mean `fgsm`"):
        search(labeller, records, Judge(labeller), character_overlap, SearchSettings(n=1, method="fgms"))
    assert run_search(labeller, []).counts["records"] == 0


@pytest.mark.slow
def test_lines_have_the_columns_of_the_data_files(labeller: LanguageModel) -> None:
    [example] = run_search(labeller, records_of(labeller), n=1).examples
    line = to_json_row(example, "gcg", {"prompt": "text", "completion": "label"})
    assert (line["text"], line["label"], line["original"]) == (example.text, example.completion, example.original)
    assert to_json_row(example, "gcg", {})["prompt"] == example.text
