"""Curricula: easy records first, paced by a plan, by the training loss, or by each record's own loss.

Curricula that follow losses decide the rows of a few steps ahead at each look, so that steps can be prefetched, and
keep a state from which a training resumes exactly.
"""

import base64
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.store.errors import UserError
from posttrain.train.data.config import CurriculumConfig

log = logging.getLogger("posttrain")

Rows = npt.NDArray[np.int64]


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


class SelfPacedCurriculum:
    """Opens the records whose latest loss is at most a threshold, which grows at each look.

    M. P. Kumar, B. Packer, D. Koller, Self-Paced Learning for Latent Variable Models, NIPS 2010, equation 5: hard
    weights v_i = 1 where L_i <= 1/K, with 1/K the threshold, and K divided by ``growth`` from one look to the next. The
    first threshold is the highest loss in the easiest share ``start`` before training. The paper computes every L_i
    again for each threshold; here it is the loss of the last step that used the record, in the training's own forward
    pass, or the loss before training. The easiest batch is always open.

    The rows up to the next look are drawn at each look, so that steps can be prefetched; processes that observe the
    same losses draw the same rows.

    Args:
        config: settings of the curriculum.
        rows: int64 [R], the phase's records.
        losses: float [all records], nats a supervised token before training.
        batch_size: records of a step, at most R.
        until: step of the phase at which the curriculum ends.
        draw: draws a step's rows, int64 [batch_size], from the open ones.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        rows: Rows,
        losses: npt.NDArray[np.floating[Any]],
        *,
        batch_size: int,
        until: int,
        draw: Callable[[int, Rows], Rows],
    ) -> None:
        self.config, self.until = config, until
        self._rows, self._batch_size, self._draw = rows, batch_size, draw
        self._first = losses.astype(np.float32)
        # A loss that exists, not an interpolated quantile: exact on every platform.
        self._threshold = np.sort(self._first[rows])[int(np.ceil(config.start * len(rows))) - 1]
        self._reset()
        self._look()

    @property
    def decided(self) -> int:
        """Number of steps whose rows are known."""
        return len(self._step_rows)

    def rows(self, step: int) -> Rows:
        """int64 [batch_size], for a decided step."""
        return self._step_rows[step]

    def competence(self, step: int) -> float:
        """Returns the share of records that is open at a decided step."""
        return self._shares[step // self.config.every]

    def observe(self, step: int, losses: npt.NDArray[np.floating[Any]] | None) -> None:
        """Takes in the losses of a step's records; one that is not finite leaves the previous one.

        Args:
            losses: float [batch_size], nats a supervised token of the step's rows, in their order; None if they
                were not measured.

        Raises:
            ValueError: it is not the step after the last one, or there are not as many losses as rows.
        """
        if step != self._seen:
            raise ValueError(f"step {step} does not follow {self._seen} observed steps")
        self._seen += 1
        if step >= self.until:
            return
        rows = self._step_rows[step]
        if losses is None or len(losses) != len(rows):
            raise ValueError(f"step {step} has {len(rows)} records, and not as many losses")
        self._take_in(rows, np.asarray(losses, np.float32))
        if self._seen % self.config.every == 0:
            self._look()

    def state(self) -> dict[str, Any]:
        """Returns the state for `load_state` as JSON: the drawn rows and their losses."""
        return {
            "seen": self._seen,
            "looks": self._seen // self.config.every,
            "every": self.config.every,
            "until": self.until,
            "batch_size": self._batch_size,
            "rows": _to_base64(np.concatenate([np.empty(0, np.int64), *self._step_rows]).astype("<i8")),
            "losses": _to_base64(np.concatenate([np.empty(0, np.float32), *self._observed_losses]).astype("<f4")),
        }

    def load_state(self, state: Mapping[str, Any], where: str, fix: str) -> None:
        """Resumes from a state.

        Raises:
            UserError: it is of other records or of steps of another size or number; names ``where`` and ``fix``.
        """
        # Base64 of the bytes: a JSON list of floats would take several times the room.
        rows = np.frombuffer(base64.b64decode(state["rows"]), "<i8").astype(np.int64)
        losses = np.frombuffer(base64.b64decode(state["losses"]), "<f4").astype(np.float32)
        own = self.state()
        if (
            any(state[name] != own[name] for name in ("every", "until", "batch_size"))
            or not np.isin(rows, self._rows).all()
        ):
            what = "the checkpoint's self-paced curriculum opened other records, or in steps of another size or number"
            raise UserError(what, where=where, fix=fix)
        self._reset()
        self._step_rows += list(rows.reshape(-1, self._batch_size))
        self._seen = state["seen"]
        self._open(0)
        step_losses = losses.reshape(-1, self._batch_size)
        for step, (step_rows, values) in enumerate(zip(self._step_rows, step_losses, strict=False), 1):
            self._take_in(step_rows, values)
            if step % self.config.every == 0:
                self._open(step // self.config.every)

    def _reset(self) -> None:
        self._seen, self._losses = 0, self._first.copy()
        self._shares: list[float] = []
        self._step_rows: list[Rows] = []
        self._observed_losses: list[npt.NDArray[np.float32]] = []

    def _take_in(self, rows: Rows, losses: npt.NDArray[np.float32]) -> None:
        # A step that overflowed leaves what was known of its records.
        measured = np.isfinite(losses)
        self._losses[rows[measured]] = losses[measured]
        self._observed_losses.append(losses)

    def _look(self) -> None:
        """Draws the rows of the steps up to the next look."""
        opened = self._open(self._seen // self.config.every)
        for step in range(self.decided, min(self._seen + self.config.every, self.until)):
            self._step_rows.append(self._draw(step, opened))

    def _open(self, looks: int) -> Rows:
        """Returns the rows that are open after so many looks, and keeps their share."""
        own = self._losses[self._rows]
        opened: Rows = self._rows[own <= self._threshold * self.config.growth**looks]
        if len(opened) < self._batch_size:
            # Fewer rows than a batch: the easiest, or the step would be smaller than those around it.
            opened = self._rows[np.argsort(own, kind="stable")[: self._batch_size]]
        self._shares.append(len(opened) / len(self._rows))
        return opened


def _to_base64(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()
