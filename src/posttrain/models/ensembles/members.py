"""The models of an ensemble: language models and linear heads, loaded one at a time, with the cost of their answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posttrain.models.ensembles.pooling import MIN_LOG_PROBABILITY
from posttrain.models.generator import Answer, greedy_answers
from posttrain.models.linear_head import LinearHead
from posttrain.models.task import Turns
from posttrain.store.errors import UserError

if TYPE_CHECKING:
    from posttrain.models.embedder import Embedder
    from posttrain.models.language_model import LanguageModel

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeadModel:
    """A linear head with the sentence model that it reads.

    Raises:
        UserError: the head was trained on embeddings of another sentence model.
    """

    head: LinearHead
    embedder: "Embedder"

    def __post_init__(self) -> None:
        if self.head.embedder and self.head.embedder != self.embedder.key:
            raise UserError("this linear head was trained on embeddings of another sentence model", where="embedder")

    def log_probabilities(self, prompts: Sequence[Turns], labels: Sequence[str]) -> Floats:
        """Computes ln P(label | prompt), float64 [N, K]; a label that the head does not know gets 1e-12, as the least.

        Raises:
            UserError: the head has a label that is not among these.
        """
        position = {label: index for index, label in enumerate(labels)}
        if unknown := [label for label in self.head.labels if label not in position]:
            raise UserError(f"the linear head has the label `{unknown[0]}`, which task.labels lacks", where="models")
        logs = np.full((len(prompts), len(labels)), MIN_LOG_PROBABILITY)
        columns = [position[label] for label in self.head.labels]
        probabilities = self.head.probabilities(self.embedder.embed(prompt_texts(prompts)))
        logs[:, columns] = np.log(np.maximum(probabilities, np.exp(MIN_LOG_PROBABILITY)))
        return logs


@dataclass(frozen=True)
class Member:
    """A model of an ensemble.

    Args:
        name: its name in the ensemble's file.
        load: loads it. An ensemble keeps one model in memory at a time.
    """

    name: str
    load: "Callable[[], LanguageModel | HeadModel]"

    @classmethod
    def of(cls, name: str, model: "LanguageModel | HeadModel") -> "Member":
        """Returns a member that is loaded already."""
        return cls(name, lambda: model)

    def language_model(self, use: str) -> "LanguageModel":
        """Loads a language model.

        Raises:
            UserError: it is a linear head, which cannot do what ``use`` says.
        """
        model = self.load()
        if isinstance(model, HeadModel):
            raise UserError(f"`{self.name}` is a linear head, which cannot {use}", where="models", fix="remove it")
        return model


@dataclass(frozen=True)
class MemberScores:
    """Answers of M models to N prompts.

    Attributes:
        log_probabilities: float64 [M, N, K], normalised over the K labels; NaN where a model was not asked.
        seconds: float64 [M], of all prompts that each model was asked, without loading it.
        flops: float64 [M, N], of each prompt that each model was asked, else 0: two for each token of the prompt and
            each parameter but the embeddings' (J. Kaplan et al., Scaling Laws for Neural Language Models, 2020, section
            2.1), without attention and without the labels' tokens.
    """

    log_probabilities: Floats
    seconds: Floats
    flops: Floats

    @property
    def confidence(self) -> Floats:
        """float64 [M, N], the probability of each model's answer."""
        # Float32 log-probabilities of a sure model can be rounded to a little above 0.
        confidence: Floats = np.minimum(np.exp(self.log_probabilities.max(axis=2)), 1.0)
        return confidence


def score_labels(
    member: Member, prompts: Sequence[Turns], labels: Sequence[str], exact: Sequence[int] | None = None
) -> tuple[Floats, float, Floats]:
    """Loads a model and computes its probabilities of the labels.

    Args:
        member: the model.
        prompts: N conversations.
        labels: K labels.
        exact: for each prompt a label to follow to its end (`posttrain.models.likelihood.label_scores`).

    Returns:
        float64 [N, K], seconds, and float64 [N] (`MemberScores`).
    """
    from posttrain.models.likelihood import label_scores

    model = member.load()
    if not prompts:
        return np.zeros((0, len(labels))), 0.0, np.zeros(0)
    start = time.perf_counter()
    if isinstance(model, HeadModel):
        logs = model.log_probabilities(prompts, labels)
    else:
        scores = label_scores(model, prompts, labels, exact=exact, progress=f"scoring labels by {member.name}")
        logs = scores.log_probabilities.astype(np.float64)
    seconds = time.perf_counter() - start
    return logs, seconds, _flops(model, prompts)


@dataclass
class MemberTexts:
    """Free-text answers of M models to N prompts, filled by `ask`.

    Attributes:
        members: the models.
        prompts: N conversations.
        answers: [M][N]; None where a model was not asked.
        seconds: float64 [M], of all prompts that each model was asked, without loading it.
        flops: float64 [M, N], as in `MemberScores`, of the tokens of prompt and answer.
    """

    members: Sequence[Member]
    prompts: Sequence[Turns]
    answers: list[list[Answer | None]] = field(init=False)
    seconds: Floats = field(init=False)
    flops: Floats = field(init=False)

    def __post_init__(self) -> None:
        models, count = len(self.members), len(self.prompts)
        self.answers = [[None] * count for _ in range(models)]
        self.seconds, self.flops = np.zeros(models), np.zeros((models, count))

    @classmethod
    def of_all(cls, members: Sequence[Member], prompts: Sequence[Turns]) -> "MemberTexts":
        """Has every model answer every prompt; one model is in memory at a time."""
        texts = cls(members, prompts)
        for number in range(len(members)):
            texts.ask(number, np.arange(len(prompts)))
        return texts

    def ask(self, number: int, rows: npt.NDArray[np.int64]) -> None:
        """Loads a model and has it answer the prompts of ``rows``, int64 [n]."""
        if not len(rows):
            return
        model = self.members[number].language_model("write a text")
        prompts = [self.prompts[row] for row in rows.tolist()]
        start = time.perf_counter()
        answers = greedy_answers(model, prompts, log_probabilities=True)
        self.seconds[number] += time.perf_counter() - start
        for row, answer in zip(rows.tolist(), answers, strict=True):
            self.answers[number][row] = answer
        tokens = [
            len(model.prompt_ids(prompt)) + len(answer.ids) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        self.flops[number, rows] = 2.0 * _parameters(model.decoder) * np.array(tokens, np.float64)

    @property
    def confidence(self) -> Floats:
        """float64 [M, N], exp of the mean log-probability of an answer's tokens; NaN where a model was not asked.

        It is 0 for an answer that was cut off: text that repeats itself without an end is of probable tokens.
        """
        return np.array([[_confidence(answer) for answer in own] for own in self.answers])

    def complete(self) -> list[list[Answer]]:
        """Returns the answers of models that were asked everything, [M][N]."""
        return [[answer for answer in own if answer is not None] for own in self.answers]

    def by(self, chosen: npt.NDArray[np.int64]) -> list[Answer]:
        """Returns the answer of model ``chosen[i]``, which was asked, to each prompt i."""
        answers = [self.answers[number][row] for row, number in enumerate(chosen.tolist())]
        return [answer for answer in answers if answer is not None]


def _confidence(answer: Answer | None) -> float:
    if answer is None or answer.mean_log_probability is None:
        return np.nan
    return float(min(np.exp(answer.mean_log_probability), 1.0)) if answer.finished else 0.0


def prompt_texts(prompts: Sequence[Turns]) -> list[str]:
    """Returns the text of each prompt as sentence models read it: the turns' contents, a line each."""
    return ["\n".join(turn["content"] for turn in prompt) for prompt in prompts]


def embedder_flops(embedder: "Embedder", prompts: Sequence[Turns]) -> Floats:
    """Returns what a sentence model computes for each prompt, float64 [N], as in `MemberScores`."""
    lengths = [len(ids) for ids in embedder.tokenizer(prompt_texts(prompts), truncation=False)["input_ids"]]
    return 2.0 * _parameters(embedder.model) * np.minimum(lengths, embedder.pooling.max_length)


def _flops(model: "LanguageModel | HeadModel", prompts: Sequence[Turns]) -> Floats:
    if isinstance(model, HeadModel):
        # The head itself is read once a prompt, not once a token.
        return embedder_flops(model.embedder, prompts) + 2.0 * model.head.weights.size
    return (
        2.0 * _parameters(model.decoder) * np.array([len(model.prompt_ids(prompt)) for prompt in prompts], np.float64)
    )


def _parameters(module: Any) -> int:
    """Counts a model's parameters without its table of embeddings, which is read and multiplies nothing."""
    total = sum(weight.numel() for weight in module.parameters())
    return int(total - module.get_input_embeddings().weight.numel())
