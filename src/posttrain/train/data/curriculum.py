"""Curricula: easy records first, paced by a plan or by the training loss.

One that follows the loss decides the rows of a few steps ahead at each look, so that steps can be prefetched, and keeps
a state from which a training resumes exactly.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.train.data.config import CurriculumConfig

log = logging.getLogger("posttrain")


def competence(config: CurriculumConfig, step: int, steps: int) -> float:
    """Returns the share of records that a fixed curriculum opens at ``step``; 1 after ``duration`` of ``steps``.

    The square-root competence of Platanios et al. 2019, arXiv:1903.09848, equation 8: with progress x and the first
    share c0, min(1, sqrt(x (1 - c0^2) + c0^2)).
    """
    progress = min(1.0, step / fully_open_step(config, steps))
    first = config.start**2
    return min(1.0, math.sqrt(progress * (1 - first) + first))


def fully_open_step(config: CurriculumConfig, steps: int) -> int:
    """Returns the first step at which all records are open; at least 1."""
    return max(1, math.ceil(config.duration * steps))


@dataclass
class AdaptiveCurriculum:
    """Opens records as the loss falls.

    The competence after a look is c0 + (1 - c0) x (L0 - L) / (L0 - target L0), in 0..1 and never less than before: L is
    the mean loss since the last look, L0 that of the first. As harder records come in, the loss stays up and no more
    are opened until it falls again: the model sets the pace, as in self-paced learning (Kumar, Packer, Koller,
    NIPS 2010), where a threshold on the records' own losses does it (see `SelfPacedCurriculum`).

    Args:
        config: settings of the curriculum.
        steps: steps of its phase.
    """

    config: CurriculumConfig
    steps: int
    shares: list[float] = field(init=False)
    """Competence from each look to the next; the first holds from step 0."""
    _seen: int = field(default=0, init=False)
    _first: float | None = field(default=None, init=False)
    _sum: float = field(default=0.0, init=False)
    _finite: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.shares = [self.config.start]

    @property
    def decided(self) -> int:
        """Number of steps whose competences are known."""
        return len(self.shares) * self.config.every

    def competence(self, step: int) -> float:
        """Returns the share of records that is open at a decided step."""
        return self.shares[step // self.config.every]

    def observe(self, step: int, loss: float) -> None:
        """Takes in a step's loss; one that is not finite is ignored.

        Raises:
            ValueError: it is not the step after the last one.
        """
        if step != self._seen:
            raise ValueError(f"step {step} does not follow {self._seen} observed steps")
        self._seen += 1
        # A NaN would make any mean NaN, and nothing would ever open again.
        if math.isfinite(loss):
            self._sum, self._finite = self._sum + loss, self._finite + 1
        if self._seen == fully_open_step(self.config, self.steps) and self.competence(step) < 1:
            log.info("  all records are open, %.0f%% before: the curriculum ends", 100 * self.competence(step))
        if self._seen % self.config.every == 0:
            self.shares.append(self._next_share(self.shares[-1]))

    def state(self) -> dict[str, Any]:
        """Returns the state for `load_state` as JSON."""
        sums = {"first": self._first, "sum": self._sum, "finite": self._finite}
        return {"shares": list(self.shares), "seen": self._seen, **sums}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state."""
        self.shares, self._seen = list(state["shares"]), state["seen"]
        self._first, self._sum, self._finite = state["first"], state["sum"], state["finite"]

    def _next_share(self, share: float) -> float:
        if self._finite:
            loss = self._sum / self._finite
            if self._first is None:
                self._first = loss
            # A first loss of 0 or less has nowhere to fall, so everything opens.
            fallen = self._first * (1 - self.config.target)
            learnt = (self._first - loss) / fallen if fallen > 0 else 1.0
            # Never closes again: records that leave would be forgotten just as they are learned.
            share = max(share, self.config.start + (1 - self.config.start) * min(1.0, max(0.0, learnt)))
        self._sum, self._finite = 0.0, 0
        return share
