"""Decides how many tasks run at a time, by the memory that they have been measured to take, also of GPUs."""

import logging
import math
from collections.abc import Iterable, Sequence

from posttrain.jobs.memory import UNKNOWN_MEMORY, Memory
from posttrain.jobs.runner import Runner

log = logging.getLogger("posttrain")

# Of the available memory, which tasks may be predicted to take. Between it and all of it nothing changes.
_USABLE_SHARE = 0.92


class MemoryPacking:
    """Packs tasks into the memory that their runner has.

    Every task is predicted to take as much as the largest so far. While nothing is known, one runs alone.

    Args:
        runner: says what is available.
        known: what earlier tasks took.
    """

    def __init__(self, runner: Runner, known: Iterable[Memory] = ()) -> None:
        self._runner = runner
        self._most = UNKNOWN_MEMORY
        for memory in known:
            self.measure(memory)
        self._logged = False

    def measure(self, memory: Memory) -> None:
        """Notes the most memory that a task has had in use."""
        self._most = self._most.maximum(memory)

    def has_room(self, running: int) -> bool:
        """Returns whether one more task fits beside those that run."""
        if running == 0:
            return True
        available, gpus = self._runner.available_bytes(), self._runner.gpu_bytes()
        if (available is not None or gpus) and not any(self._most):
            return False
        fits = self._fits(running + 1, _USABLE_SHARE, available, gpus)
        if not fits and not self._logged:
            of_gpu = f", and {self._most.gpu / 1e9:.2f} GB of a GPU" if self._most.gpu else ""
            text = f"{self._most.host / 1e9:.2f} GB{of_gpu}"
            log.info("  memory for %d at a time: one has taken up to %s", running, text)
            self._logged = True
        return fits

    def is_over(self, running: int) -> bool:
        """Returns whether so many tasks may take more than there is; one alone never does, as nothing helps it."""
        if running <= 1:
            return False
        return not self._fits(running, 1.0, self._runner.available_bytes(), self._runner.gpu_bytes())

    def _fits(self, count: int, share: float, available: int | None, gpus: Sequence[int]) -> bool:
        """Returns whether so many tasks fit into a share of the machine's memory, and of that of each GPU."""
        if available is not None and self._most.host * count > share * available:
            return False
        of_gpu = math.ceil(count / len(gpus)) if gpus else 0
        return of_gpu <= 1 or self._most.gpu * of_gpu <= share * min(gpus)
