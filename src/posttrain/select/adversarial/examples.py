"""Inputs and results of a search for adversarial prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.models.task import Turns


@dataclass(frozen=True)
class LabelledPrompt:
    """A record with its answer."""

    id: str
    prompt: Turns
    completion: str


@dataclass(frozen=True)
class JudgedAnswers:
    """A model's answers to N prompts, and whether each is right."""

    answers: list[str]
    right: list[bool]


Judge = Callable[[Sequence[LabelledPrompt], Sequence[Turns]], JudgedAnswers]
"""Lets the model answer a prompt in place of each record's own, in the way that it is evaluated."""


@dataclass(frozen=True)
class SearchSettings:
    """The method of a search, and its bounds.

    Attributes:
        n: number of examples to search for.
        method: one of `posttrain.select.adversarial.search.ATTACKS`.
        similarity: least cosine of the sentence embeddings of old and new words.
        swaps: most tokens that may differ.
        budget: most sequences that the model reads in all, but for the closing check.
        seed: fixes which records are tried first, and every draw.
    """

    n: int
    method: str = "gcg"
    similarity: float = 0.8
    swaps: int = 3
    budget: int = 10_000
    seed: int = 0


@dataclass(frozen=True)
class AdversarialExample:
    """A prompt that the model answers differently from the record that it rewrites.

    Attributes:
        original: id of that record.
        prompt: the turns, with other words in the last of the user's.
        text_before, text: those words, of the record and of this prompt.
        answer_before, answer: the model's answers; the first is right.
        similarity: cosine of the words' sentence embeddings.
        swaps: number of tokens that differ.
        loss_before, loss: -ln P(right answer | prompt) in nats, among the labels where there are some.
    """

    original: str
    prompt: Turns
    completion: str
    text_before: str
    text: str
    answer_before: str
    answer: str
    similarity: float
    swaps: int
    loss_before: float
    loss: float


@dataclass(frozen=True)
class SearchOutcome:
    """The examples of a search, and its counts.

    Attributes:
        examples: the examples, in the order in which their records were tried.
        counts: ``records`` judged; of these ``wrong`` (the model does not answer them rightly to begin with),
            ``no_words`` (the user's words cannot be separated from the template), and ``tried``; of these ``unchanged``
            (every rewriting kept its answer), ``out_of_budget``, ``unconfirmed`` (only the first check saw another
            answer) and ``kept``.
        passes: number of sequences that the model has read.
    """

    examples: list[AdversarialExample] = field(repr=False)
    counts: dict[str, int]
    passes: int


def to_json_row(example: AdversarialExample, method: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """Returns an example as a line of JSON, which `posttrain data add` reads; other columns become its meta.

    Args:
        example: the example.
        method: name of the attack.
        columns: names of the file's columns in place of ``prompt`` and ``completion``.
    """
    # A single turn as a plain string, which every format of records takes; a conversation stays a list of turns.
    alone = len(example.prompt) == 1
    return {
        columns.get("prompt", "prompt"): example.text if alone else example.prompt,
        columns.get("completion", "completion"): example.completion,
        "original": example.original,
        "original_text": example.text_before,
        "answer_before": example.answer_before,
        "answer_after": example.answer,
        "similarity": round(example.similarity, 4),
        "swaps": example.swaps,
        "loss_before": round(example.loss_before, 4),
        "loss_after": round(example.loss, 4),
        "method": method,
    }
