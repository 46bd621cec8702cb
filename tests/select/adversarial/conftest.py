"""A tiny model with a label set, and problems for it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.select.adversarial.problem import AnswerLoss, AttackProblem, QueryBudget
from posttrain.select.adversarial.rewriting import Vocabulary, find_passage

LABELS = ["card", "cash", "loan", "rate"]


@pytest.fixture(scope="session")
def labeller(tiny_model: Path) -> LanguageModel:
    task = TaskConfig(labels=LABELS, system="Name the topic: x or y.", template="Message: {prompt} (end)")
    return load_language_model(tiny_model, task, dtype="float32")


def always_similar(text: str, others: Sequence[str]) -> npt.NDArray[np.float64]:
    return np.ones(len(others))


@pytest.fixture
def problem(labeller: LanguageModel) -> Callable[..., AttackProblem]:
    """``problem("my card", swaps=2)``: a problem for the tiny model that counts all texts as similar."""

    def make(text: str = "my card is late", swaps: int = 2, budget: int = 10_000, **changes: object) -> AttackProblem:
        passage = find_passage(labeller, [{"role": "user", "content": text}])
        assert passage is not None
        return AttackProblem(
            lm=labeller,
            passage=passage,
            objective=changes.pop("objective", AnswerLoss(labeller, LABELS)),  # type: ignore[arg-type]
            vocabulary=Vocabulary.from_language_model(labeller),
            similarity=changes.pop("similarity", always_similar),  # type: ignore[arg-type]
            min_similarity=0.5,
            max_swaps=swaps,
            budget=QueryBudget(budget),
            generator=np.random.default_rng(0),
        )

    return make
