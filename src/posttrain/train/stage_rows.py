"""Which records the steps of one stage meet."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.store.errors import UserError
from posttrain.train.curriculum import Adaptive, competence, opened
from posttrain.train.passes import Part, Passes
from posttrain.train.self_paced import SelfPaced

if TYPE_CHECKING:
    from posttrain.train.order import StageConfig


class StageRows:
    """The rows of one stage, whose first pass is number ``first_epoch`` of the training."""

    def __init__(
        self,
        config: "StageConfig",
        parts: Sequence[Part],
        batch_size: int,
        seed: int | None,
        first_epoch: int,
        difficulties: np.ndarray | None,
    ) -> None:
        self.config, self.first_epoch, self._batch_size, self._seed = config, first_epoch, batch_size, seed or 0
        self.passes = Passes(parts, batch_size, seed, first_epoch)
        self.steps = config.steps or self.passes.batches * (config.epochs or 1)
        curriculum, rows = config.curriculum, parts[0].rows
        # From this step on all records come in passes.
        self._open = 0 if curriculum.name == "none" else min(self.steps, opened(curriculum, self.steps))
        self._ranked = None
        self.pacing: Adaptive | SelfPaced | None = None
        """What goes by the losses."""
        if difficulties is not None:  # the easiest first; the records' order decides between equals
            self._ranked = rows[np.argsort(difficulties[rows], kind="stable")]
        if curriculum.name == "adaptive":
            self.pacing = Adaptive(curriculum, self.steps)
        elif curriculum.name == "self_paced":
            assert difficulties is not None
            self.pacing = SelfPaced(
                curriculum,
                rows,
                difficulties,
                batch_size=min(batch_size, len(rows)),
                until=self._open,
                draw=self._drawn,
            )

    @property
    def decided(self) -> int:
        """How many of the stage's steps have known rows."""
        if self.pacing is None or self.pacing.decided >= self._open:
            return self.steps
        return self.pacing.decided

    def rows(self, step: int) -> np.ndarray:
        """int64 [at most batch size], for a step that is decided."""
        if self._ranked is None or step >= self._open:
            return self.passes.rows(step - self._open)
        if isinstance(self.pacing, SelfPaced):
            return self.pacing.rows(step)
        if self.pacing is None:
            share = competence(self.config.curriculum, step, self.steps)
        else:
            share = self.pacing.competence(step)
        return self._drawn(step, self._ranked[: max(self._batch_size, ceil(share * len(self._ranked)))])

    def wants_unit_losses(self, step: int) -> bool:
        """Whether what a step measures of each of its records decides later ones."""
        return isinstance(self.pacing, SelfPaced) and step < self._open

    def observe(self, step: int, loss: float, unit_losses: np.ndarray | None) -> None:
        """Tell of a step's loss, and of its records' own where they are wanted."""
        if isinstance(self.pacing, SelfPaced):
            self.pacing.observe(step, unit_losses)
        elif self.pacing is not None:
            self.pacing.observe(step, loss)

    def load_state(self, state: Mapping[str, Any], where: str, fix: str) -> None:
        """Go on from what ``pacing`` had as its state.

        Raises:
            UserError: it was another one, and names ``where`` and ``fix``.
        """
        if ("shares" in state) != isinstance(self.pacing, Adaptive):
            raise UserError("the checkpoint is of another curriculum", where=where, fix=fix)
        if isinstance(self.pacing, SelfPaced):
            self.pacing.load_state(state, where, fix)
        elif self.pacing is not None:
            self.pacing.load_state(state)

    def _drawn(self, step: int, known: np.ndarray) -> np.ndarray:
        """Rows of those that are open, drawn at random."""
        random = np.random.default_rng([self._seed, self.first_epoch, step, 0, 0, 1])
        drawn: np.ndarray = known[random.choice(len(known), min(self._batch_size, len(known)), replace=False)]
        return drawn
