"""Models with given probabilities, in place of those that take seconds to load."""

from collections.abc import Sequence

import numpy as np
import pytest

from posttrain.models.ensembles import ensemble as ensemble_module
from posttrain.models.ensembles.config import EnsembleConfig
from posttrain.models.ensembles.ensemble import Ensemble
from posttrain.models.ensembles.members import Member
from posttrain.models.task import TaskConfig, Turns


def turns(count: int) -> list[Turns]:
    """Returns prompts whose text is their number."""
    return [[{"role": "user", "content": str(row)}] for row in range(count)]


def random_logs(models: int, count: int, labels: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    """Returns log-probabilities, float64 [M, N, K]."""
    logits = scale * np.random.default_rng(seed).standard_normal((models, count, labels))
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=2, keepdims=True)))


class GivenModels:
    """Builds ensembles of models that give ``logs[m]``; ``asked`` has the prompts that each was asked, by its name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, list[int]] = {}
        self._logs: dict[str, np.ndarray] = {}
        patch.setattr(ensemble_module, "score_labels", self._score)

    def __call__(self, logs: np.ndarray, names: Sequence[str] | None = None, **config: object) -> Ensemble:
        names = names or [f"m{number}" for number in range(len(logs))]
        self._logs |= dict(zip(names, logs, strict=True))
        members = [Member(name, lambda: pytest.fail("no model is loaded")) for name in names]
        task = TaskConfig(labels=[f"label {index}" for index in range(logs.shape[2])])
        return Ensemble(EnsembleConfig.read({"models": list(names), **config}, "ensemble.yaml"), members, task)

    def _score(
        self, member: Member, prompts: Sequence[Turns], labels: Sequence[str], exact: object
    ) -> tuple[np.ndarray, float, np.ndarray]:
        rows = [int(prompt[0]["content"]) for prompt in prompts]
        self.asked.setdefault(member.name, []).extend(rows)
        cost = 10.0 ** int(member.name[-1])
        return self._logs[member.name][rows], cost * len(rows), np.full(len(rows), 2 * cost)
