"""Counts what a study spends: its own seconds, tokens, and seconds of devices, which trials may share."""

from posttrain.tune.backends.base import Backend
from posttrain.tune.budget import Spent
from posttrain.tune.study import Study
from posttrain.tune.trial import Trial


class Spending:
    """Counts the costs of a study over all sessions.

    Trials that run at the same time on one device share it: its seconds count once, by the study's clock. Where every
    trial has devices of its own, as in a queue of batch jobs, the seconds of a device are those of its trials.

    Args:
        study: has what earlier sessions have spent.
        backend: runs the trials, and owns the time.
    """

    def __init__(self, study: Study, backend: Backend) -> None:
        self._backend, self._runs = backend, 0
        self._offset = study.clock - backend.clock()
        self._tokens = sum(trial.tokens for trial in study.trials)
        self._device_seconds, self._counted = study.device_seconds, study.clock

    @property
    def seconds(self) -> float:
        """The seconds that the study has been worked on."""
        return self._offset + self._backend.clock()

    @property
    def spent(self) -> Spent:
        """All costs so far."""
        self._count()
        return Spent(self._counted, self._tokens, self._device_seconds)

    @property
    def devices_in_use(self) -> int:
        """The shared devices on which trials run now."""
        return 0 if self._backend.devices is None else min(self._runs, self._backend.devices)

    def set_runs(self, runs: int) -> None:
        """Notes how many trials run from now on."""
        self._count()
        self._runs = runs

    def add(self, trial: Trial, seconds: float, tokens: int) -> None:
        """Adds what a trial has spent in all, over all its runs, to what was known of it."""
        if self._backend.devices is None:
            self._device_seconds += max(0.0, seconds - trial.seconds)
        self._tokens += max(0, tokens - trial.tokens)

    def _count(self) -> None:
        """Adds the time since the last call to that of the devices in use."""
        now = self.seconds
        self._device_seconds += (now - self._counted) * self.devices_in_use
        self._counted = now
