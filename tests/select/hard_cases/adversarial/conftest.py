"""A tiny model with a label set, and problems for it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from posttrain.models.language_model import LanguageModel, load
from posttrain.models.task import TaskConfig
from posttrain.select.hard_cases.adversarial.objective import Objective
from posttrain.select.hard_cases.adversarial.passage import find_passage
from posttrain.select.hard_cases.adversarial.problem import Budget, Problem
from posttrain.select.hard_cases.adversarial.vocabulary import Vocabulary

LABELS = ["card", "cash", "loan", "rate"]


@pytest.fixture(scope="session")
def labeller(tiny_model: Path) -> LanguageModel:
    task = TaskConfig(labels=LABELS, system="Name the topic: x or y.", template="Message: {prompt} (end)")
    return load(tiny_model, task, dtype="float32")


def all_alike(text: str, others: Sequence[str]) -> npt.NDArray[np.float64]:
    return np.ones(len(others))


@pytest.fixture
def problem(labeller: LanguageModel) -> Callable[..., Problem]:
    """``problem("my card", swaps=2)``: a problem for the tiny model, to which all texts mean the same."""

    def make(text: str = "my card is late", swaps: int = 2, budget: int = 10_000, **changes: object) -> Problem:
        passage = find_passage(labeller, [{"role": "user", "content": text}])
        assert passage is not None
        return Problem(
            lm=labeller,
            passage=passage,
            objective=changes.pop("objective", Objective(labeller, LABELS)),  # type: ignore[arg-type]
            vocabulary=Vocabulary.of(labeller),
            similarity=changes.pop("similarity", all_alike),  # type: ignore[arg-type]
            least_similarity=0.5,
            most_swaps=swaps,
            budget=Budget(budget),
            generator=np.random.default_rng(0),
        )

    return make
