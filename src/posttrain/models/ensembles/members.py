"""The models of an ensemble: language models and linear heads, loaded one at a time, with the cost of their answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posttrain.models.ensembles.pooling import MIN_LOG_PROBABILITY
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
        load: loads it. An ensemble keeps one model in memory at a time, unless they answer token by token.
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


def prompt_texts(prompts: Sequence[Turns]) -> list[str]:
    """Returns the text of each prompt as sentence models read it: the turns' contents, a line each."""
    return ["\n".join(turn["content"] for turn in prompt) for prompt in prompts]


def _flops(model: "LanguageModel | HeadModel", prompts: Sequence[Turns]) -> Floats:
    if isinstance(model, HeadModel):
        texts = prompt_texts(prompts)
        lengths = [len(ids) for ids in model.embedder.tokenizer(texts, truncation=False)["input_ids"]]
        tokens = np.minimum(lengths, model.embedder.pooling.max_length)
        # The head itself is read once a prompt, not once a token.
        return 2.0 * _parameters(model.embedder.model) * tokens + 2.0 * model.head.weights.size
    return (
        2.0 * _parameters(model.decoder) * np.array([len(model.prompt_ids(prompt)) for prompt in prompts], np.float64)
    )


def _parameters(module: Any) -> int:
    """Counts a model's parameters without its table of embeddings, which is read and multiplies nothing."""
    total = sum(weight.numel() for weight in module.parameters())
    return int(total - module.get_input_embeddings().weight.numel())
