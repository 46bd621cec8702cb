"""The result of a study: the best settings, and all trials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.tune.trial import Span, Trial, lineage


@dataclass(frozen=True)
class TuneResult:
    """The outcome of a study.

    Attributes:
        best: the trial with the best value, of several objectives the one that is chosen; None if none has a value.
        trials: all trials, by number.
        front: with several objectives, the finished trials that no other is better than in every one, by number.
        current: the trial of the settings in force before the study; None if they were not tried.
    """

    best: Trial | None
    trials: Sequence[Trial]
    front: Sequence[Trial] = ()
    current: Trial | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The best settings.

        Raises:
            ValueError: no trial has a value.
        """
        return self._best_or_error.settings

    @property
    def value(self) -> float:
        """The best value, of several objectives that of the first.

        Raises:
            ValueError: no trial has a value.
        """
        return self.values[0]

    @property
    def values(self) -> tuple[float, ...]:
        """The values of all objectives.

        Raises:
            ValueError: no trial has a value.
        """
        values = self._best_or_error.latest_values
        assert values is not None
        return values

    @property
    def schedule(self) -> Sequence[Span]:
        """The settings of the best trial by step: one span unless it went on from checkpoints of others.

        Raises:
            ValueError: no trial has a value.
        """
        return lineage(self.trials, self._best_or_error.number)

    @property
    def _best_or_error(self) -> Trial:
        if self.best is None:
            reason = next((trial.error for trial in self.trials if trial.error), "none was run")
            raise ValueError(f"no trial has a value: {reason}")
        return self.best
