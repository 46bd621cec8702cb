"""Curricula: easy records first, and how fast the hard ones follow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from posttrain.store.section import Section


class CurriculumConfig(Section):
    """Train on easy records first (Bengio et al., Curriculum Learning, ICML 2009).

    A model of competence c, a share from 0 to 1, is shown the share c of the records that is easiest, drawn at random
    for each step (Platanios et al. 2019, arXiv:1903.09848, algorithm 1). Once all are open, they come in passes again.
    """

    name: Literal["none", "fixed", "adaptive", "self_paced"] = Field(
        "none",
        description="Records as they come; more of them by a plan; as the loss falls; or those whose own loss is low.",
    )
    difficulty: str = Field(
        "loss", description="How hard records are: their loss before training, or a column of the data with numbers."
    )
    start: float = Field(0.1, gt=0, le=1, description="Share of the records, the easiest, that is open at first.")
    duration: float = Field(0.5, gt=0, le=1, description="Share of the steps after which all records are open.")
    pacing: Literal["linear", "root", "step"] = Field("root", description="How a fixed curriculum opens them.")
    power: float = Field(2.0, gt=0, description="root: which root; a higher one opens more records early.")
    stairs: int = Field(4, ge=1, description="step: in how many equal steps.")
    target: float = Field(0.5, ge=0, lt=1, description="adaptive: share of the first loss at which all are open.")
    every: int = Field(10, ge=1, description="adaptive, self_paced: steps between two looks at the losses.")
    growth: float = Field(1.3, gt=1, description="self_paced: what each look multiplies the highest loss of all by.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.name == "self_paced" and self.difficulty != "loss":
            raise ValueError("self_paced goes by the records' own losses: leave out `difficulty`")
        return self


def competence(config: CurriculumConfig, step: int, steps: int) -> float:
    """Share of the records that a fixed curriculum has open at ``step`` (from 0), 1 from ``duration`` of ``steps`` on.

    The linear and the root-p competence of Platanios et al. 2019, arXiv:1903.09848: with progress x = step / T and the
    first share c0, min(1, x (1 - c0^p) + c0^p)^(1/p), p = 1 for ``linear`` and the power for ``root``. ``step`` opens
    the rest in equal parts at equal distances, as the stages of Bengio et al. 2009.
    """
    progress = min(1.0, step / opened(config, steps))
    if config.pacing == "step":
        stair = math.floor(progress * config.stairs)
        return config.start + (1 - config.start) * stair / config.stairs
    power = config.power if config.pacing == "root" else 1.0
    first = config.start**power
    return float(min(1.0, progress * (1 - first) + first) ** (1 / power))


def opened(config: CurriculumConfig, steps: int) -> int:
    """The step from which on all records are open at the latest; at least 1."""
    return max(1, math.ceil(config.duration * steps))


@dataclass
class Adaptive:
    """A curriculum that goes by the loss: every few steps it opens records for what the model has learnt since.

    The competence after a look is c0 + (1 - c0) x (L0 - L) / (L0 - target L0), in 0..1 and never less than before: L is
    the mean loss since the last look, L0 that of the first. As harder records come in, the loss stays up and no more
    are opened until it falls again: the model sets the pace, as in self-paced learning (Kumar, Packer, Koller,
    NIPS 2010), where a threshold on the records' own losses does it (see `posttrain.train.self_paced`).

    Args:
        config: of the curriculum.
        steps: steps of the training, or of the stage of it that this curriculum is for.
    """

    config: CurriculumConfig
    steps: int
    shares: list[float] = field(init=False)
    """Competence from each look to the next; the first holds from step 0."""
    _first: float | None = field(default=None, init=False)
    _sum: float = field(default=0.0, init=False)
    _finite: int = field(default=0, init=False)
    _seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.shares = [self.config.start]

    @property
    def decided(self) -> int:
        """How many steps' competences are known."""
        return len(self.shares) * self.config.every

    def competence(self, step: int) -> float:
        """Share of the records that is open at a step that is decided."""
        return self.shares[step // self.config.every]

    def observe(self, step: int, loss: float) -> None:
        """Take in what a step measured; a loss that is no finite number counts for nothing.

        Raises:
            ValueError: it is not the step after the last one.
        """
        if step != self._seen:
            raise ValueError(f"step {step} is told of after {self._seen} steps")
        self._seen += 1
        if math.isfinite(loss):
            self._sum, self._finite = self._sum + loss, self._finite + 1
        if self._seen % self.config.every == 0:
            self._look()

    def state(self) -> dict[str, Any]:
        """What `load_state` takes, as JSON values."""
        return {
            "shares": list(self.shares),
            "first": self._first,
            "sum": self._sum,
            "finite": self._finite,
            "seen": self._seen,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.shares, self._first = list(state["shares"]), state["first"]
        self._sum, self._finite, self._seen = state["sum"], state["finite"], state["seen"]

    def _look(self) -> None:
        share = self.shares[-1]
        if self._finite:
            loss = self._sum / self._finite
            if self._first is None:
                self._first = loss
            fallen = self._first * (1 - self.config.target)
            learnt = (self._first - loss) / fallen if fallen > 0 else 1.0
            share = max(share, self.config.start + (1 - self.config.start) * min(1.0, max(0.0, learnt)))
        self.shares.append(share)
        self._sum, self._finite = 0.0, 0
