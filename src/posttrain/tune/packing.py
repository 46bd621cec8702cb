"""Decides how many trials run at a time, by the memory that trials have been measured to take."""

import logging
from collections.abc import Sequence

from posttrain.tune.backends.base import Backend
from posttrain.tune.trial import Trial

log = logging.getLogger("posttrain")

_USABLE_SHARE = (
    0.92  # of the available memory, that trials may be predicted to take; between it and all nothing changes
)


class MemoryPacking:
    """Packs trials into the memory that their backend has.

    Every trial is predicted to take as much as the largest so far. While nothing is known, one runs alone.

    Args:
        backend: says what is available.
        trials: of earlier sessions.
    """

    def __init__(self, backend: Backend, trials: Sequence[Trial]) -> None:
        self._backend = backend
        self._most = max((trial.memory_bytes for trial in trials), default=0)
        self._logged = False

    def measure(self, memory_bytes: int) -> None:
        """Notes the most memory that a trial has had in use; 0 where that is not known."""
        self._most = max(self._most, memory_bytes)

    def has_room(self, running: int) -> bool:
        """Returns whether one more trial fits beside those that run."""
        if running == 0:
            return True
        available = self._backend.available_bytes()
        if available is None:
            return True
        fits = 0 < self._most * (running + 1) <= _USABLE_SHARE * available
        if self._most and not fits and not self._logged:
            log.info("  memory for %d at a time: a trial has taken up to %.2f GB", running, self._most / 1e9)
            self._logged = True
        return fits

    def is_over(self, running: int) -> bool:
        """Returns whether so many trials may take more than there is; one alone never does, as nothing helps it."""
        if running <= 1:
            return False
        available = self._backend.available_bytes()
        return available is not None and self._most * running > available
