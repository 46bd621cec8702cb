"""Curricula: easy records first, paced by a plan, by the training loss, or by each record's own loss.

Curricula that follow losses decide the rows of a few steps ahead at each look, so that steps can be prefetched, and
keep a state from which a training resumes exactly.
"""

import base64
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.store.errors import UserError
from posttrain.train.data.config import CurriculumConfig

log = logging.getLogger("posttrain")

Rows = npt.NDArray[np.int64]


def competence(config: CurriculumConfig, step: int, steps: int) -> float:
    """Returns the share of records that a fixed curriculum opens at ``step``; 1 after ``duration`` of ``steps``.

    The linear and the root-p competence of Platanios et al. 2019, arXiv:1903.09848: with progress x = step / T and the
    first share c0, min(1, x (1 - c0^p) + c0^p)^(1/p), p = 1 for ``linear`` and the power for ``root``. ``step`` opens
    the rest in equal parts at equal distances, as the stages of Bengio et al. 2009.
    """
    progress = min(1.0, step / fully_open_step(config, steps))
    if config.pacing == "step":
        # The last stair is reached at the end of the curriculum, when everything is open.
        return _stair(config, math.floor(progress * config.stairs))
    power = config.power if config.pacing == "root" else 1.0
    first = config.start**power
    return float(min(1.0, progress * (1 - first) + first) ** (1 / power))


def _stair(config: CurriculumConfig, number: int) -> float:
    """Returns the share that is open after ``number`` of ``stairs`` equal steps."""
    return config.start + (1 - config.start) * number / config.stairs


def fully_open_step(config: CurriculumConfig, steps: int) -> int:
    """Returns the first step at which all records are open; at least 1."""
    return max(1, math.ceil(config.duration * steps))


@dataclass
class LossPacedCurriculum(ABC):
    """Opens a share of the records that depends on the losses so far, decided anew every few steps.

    Args:
        config: settings of the curriculum.
        steps: steps of the training, or of its phase with this curriculum.
    """

    config: CurriculumConfig
    steps: int
    shares: list[float] = field(init=False)
    """Competence from each look to the next; the first holds from step 0."""
    _seen: int = field(default=0, init=False)

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
            self._take_in(step, loss)
        if self._seen == fully_open_step(self.config, self.steps) and self.competence(step) < 1:
            log.info("  all records are open, %.0f%% before: the curriculum ends", 100 * self.competence(step))
        if self._seen % self.config.every == 0:
            self.shares.append(self._next_share(self.shares[-1]))

    def state(self) -> dict[str, Any]:
        """Returns the state for `load_state` as JSON."""
        return {"shares": list(self.shares), "seen": self._seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state."""
        self.shares, self._seen = list(state["shares"]), state["seen"]

    @abstractmethod
    def _take_in(self, step: int, loss: float) -> None:
        """Takes in a finite loss."""

    @abstractmethod
    def _next_share(self, share: float) -> float:
        """Returns the share that is open from this look on, which is never less than the last one, ``share``."""


@dataclass
class AdaptiveCurriculum(LossPacedCurriculum):
    """Opens records as the loss falls.

    The competence after a look is c0 + (1 - c0) x (L0 - L) / (L0 - target L0), in 0..1 and never less than before: L is
    the mean loss since the last look, L0 that of the first. As harder records come in, the loss stays up and no more
    are opened until it falls again: the model sets the pace, as in self-paced learning (Kumar, Packer, Koller,
    NIPS 2010), where a threshold on the records' own losses does it (see `SelfPacedCurriculum`).
    """

    _first: float | None = field(default=None, init=False)
    _sum: float = field(default=0.0, init=False)
    _finite: int = field(default=0, init=False)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "first": self._first, "sum": self._sum, "finite": self._finite}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._first, self._sum, self._finite = state["first"], state["sum"], state["finite"]

    def _take_in(self, step: int, loss: float) -> None:
        self._sum, self._finite = self._sum + loss, self._finite + 1

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


@dataclass
class StagnationCurriculum(LossPacedCurriculum):
    """Opens harder records once the loss has stopped falling: the model has learned what the open ones teach.

    The loss stagnates where it falls over the last ``window`` steps by at most ``tolerance`` times its scale: the
    largest median of a window so far. Beside the window's own median, a loss on its way to zero would fall forever. The
    fall is `theil_sen_fall`, as a line of least squares follows a single spike. Each time one of ``stairs`` equal parts
    of the closed records is opened, and a window begins anew, as the loss of easier records says nothing about the
    harder ones. A window of which half the steps or more have no finite loss says nothing.
    """

    _window: list[tuple[int, float]] = field(default_factory=list, init=False)
    """Steps and finite losses of the window, the oldest first."""
    _since: int = field(default=0, init=False)
    """The first step whose loss counts."""
    _rises: int = field(default=0, init=False)
    _scale: float = field(default=0.0, init=False)

    def state(self) -> dict[str, Any]:
        window = [list(entry) for entry in self._window]
        return {**super().state(), "window": window, "since": self._since, "rises": self._rises, "scale": self._scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._window = [(int(step), float(loss)) for step, loss in state["window"]]
        self._since, self._rises, self._scale = state["since"], state["rises"], state["scale"]

    def _take_in(self, step: int, loss: float) -> None:
        first = step - self.config.window
        self._window = [entry for entry in self._window if entry[0] > first] + [(step, loss)]

    def _next_share(self, share: float) -> float:
        size = self.config.window
        window = [entry for entry in self._window if entry[0] >= self._seen - size]
        if self._seen - self._since < size or 2 * len(window) <= size:
            return share
        self._scale = max(self._scale, abs(median(loss for _, loss in window)))
        if theil_sen_fall(window, size) > self.config.tolerance * self._scale:
            return share
        self._window, self._since = [], self._seen
        self._rises = min(self._rises + 1, self.config.stairs)
        opened = _stair(self.config, self._rises)
        if opened > share and self._seen < fully_open_step(self.config, self.steps):
            log.info("  the loss has stopped falling: %.0f%% of the records are open", 100 * opened)
        return opened


def theil_sen_fall(window: Sequence[tuple[int, float]], size: int) -> float:
    """Returns by how much losses fall: -b (size - 1), with b the median slope of all pairs.

    P. K. Sen, Estimates of the Regression Coefficient Based on Kendall's Tau, JASA 1968. Up to 29% of outliers cannot
    move it arbitrarily.

    Args:
        window: steps and finite losses, at least two.
        size: steps that the window spans.
    """
    steps, losses = (np.array(values, np.float64) for values in zip(*window, strict=True))
    earlier, later = np.triu_indices(len(window), 1)
    slope = np.median((losses[later] - losses[earlier]) / (steps[later] - steps[earlier]))
    return float(-slope * (size - 1))


def edge_weights(count: int, open_count: int, config: CurriculumConfig) -> npt.NDArray[np.float64]:
    """Returns how often the open records are drawn, float64 [open_count], from the easiest to the hardest.

    A record at the quantile q of the difficulty has the weight 1 + emphasis x exp(-((s - q) / width)^2 / 2), with s the
    open share: those near the threshold are drawn most often, as the easier ones are learned already.

    Args:
        count: number of records, open or not.
        open_count: number of open ones.
    """
    distance = np.arange(open_count - 1, -1, -1) / count
    return np.asarray(1 + config.emphasis * np.exp(-((distance / config.width) ** 2) / 2))


class SelfPacedCurriculum:
    """Opens the records whose latest loss is at most a threshold, which grows at each look.

    M. P. Kumar, B. Packer, D. Koller, Self-Paced Learning for Latent Variable Models, NIPS 2010, equation 5: hard
    weights v_i = 1 where L_i <= 1/K, with 1/K the threshold, and K divided by ``growth`` from one look to the next. The
    first threshold is the highest loss in the easiest share ``start`` before training. The paper computes every L_i
    anew for each threshold; here it is the loss of the last step that used the record, in the training's own forward
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
