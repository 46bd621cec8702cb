"""Ends a study whose best can hardly be improved: by a bound on the regret, from a Gaussian process over its trials."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from posttrain.store.files import write_atomically
from posttrain.tune.acquisition import confidence_weight, upper_confidence_bound
from posttrain.tune.budget import Budget, Gain
from posttrain.tune.gaussian_process import encode_all
from posttrain.tune.losses import newest_and_best, standardize
from posttrain.tune.samplers.gaussian import GaussianProcessSampler, only_above
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial

log = logging.getLogger("posttrain")

STOP_FILE = "stopped.json"
"""The trials and the budget with which a study was ended early, in its folder."""

_LEAST, _PER_PARAMETER = 10, 4  # trials with a value, before which the model is not trusted

_PATIENCE = 3  # last trials that must not have the best

_LEAST_SUCCESS = 0.1  # probability: with 90% none of the points that are left out would have a value

_FURTHER = 5  # trials that a study runs at least, when it is resumed with another budget


def read_reason(folder: Path) -> str:
    """Returns why the study in a folder was ended early; empty where it was not."""
    file = folder / STOP_FILE
    return str(json.loads(file.read_bytes())["reason"]) if file.is_file() else ""


class GainRule:
    """Stops a study when the regret of its best settings is below a threshold with 90% probability.

    The regret is at most the least upper confidence bound of the settings that were tried, less the least lower
    confidence bound of the space (Makarova et al. 2022, arXiv:2104.08166, equation 4), without points where a trial
    fails with 90% probability. The process is fitted to at
    least ten trials, four a parameter, and the last three must not have the best. A study that was stopped and is
    resumed with another budget runs five more trials first. The bound holds as far as the process does: a dip that is
    much narrower than what the trials show is not expected.

    Args:
        space: what is searched.
        gain: the threshold.
        budget: of this session.
        maximize: whether greater values are better.
        seed: of the fit.
        folder: of the study; None keeps nothing.
    """

    def __init__(
        self,
        space: Space,
        gain: Gain,
        budget: Budget,
        *,
        maximize: bool = False,
        seed: int = 0,
        folder: Path | None = None,
    ) -> None:
        self._space, self._gain, self._maximize, self._seed = space, gain, maximize, seed
        self._model = GaussianProcessSampler(space, seed, maximize)
        self._model.transform = False  # a gain is a difference of losses
        self._settings = {"budget": repr(budget), "gain": gain.text}
        self._file = None if folder is None else folder / STOP_FILE
        self._least = max(_LEAST, _PER_PARAMETER * len(space.parameters))
        self._checked, self._reason = -1, ""
        if self._file is not None and self._file.is_file():
            before = json.loads(self._file.read_bytes())
            same = {name: before[name] for name in self._settings} == self._settings
            self._least = max(self._least, before["values"] + (0 if same else _FURTHER))

    def reason(self, trials: Sequence[Trial]) -> str:
        """Returns why the study is to end; empty where it goes on."""
        losses = self._model.comparable_losses([trial for trial in trials if trial.ended or trial.reports])
        # Not for each question: a fit takes a while.
        if len(losses) != self._checked:
            self._checked = len(losses)
            before, self._reason = self._reason, self._decide(trials, losses)
            if self._reason and not before:
                log.info("  %s", self._reason)
        return self._reason

    def keep(self) -> None:
        """Keeps for later sessions, and for whoever looks at the study, that it has been ended."""
        if self._file is None:
            return
        # As it was when a trial was to start: a study whose budget is spent has not been ended early.
        if self._reason:
            content = {**self._settings, "values": self._checked, "reason": self._reason}
            write_atomically(self._file, json.dumps(content, ensure_ascii=False).encode())
        else:
            self._file.unlink(missing_ok=True)

    def _decide(self, trials: Sequence[Trial], losses: dict[int, float]) -> str:
        if len(losses) < self._least:
            return ""
        best = min(losses, key=lambda number: (losses[number], number))
        if best in sorted(losses)[-_PATIENCE:]:
            return ""
        generator = np.random.default_rng([self._seed, len(losses)])
        predictor, _ = self._model.fit(trials, losses, generator)
        numbers = newest_and_best(losses)
        _, (_, scale) = standardize([losses[number] for number in numbers])
        beta = confidence_weight(len(losses), len(self._space.parameters))

        def promise(points: np.ndarray) -> np.ndarray:
            return upper_confidence_bound(*predictor.predict(points), beta)

        feasible = only_above(promise, self._model.log_success(trials, generator), _LEAST_SUCCESS)
        lowest = self._model.search(feasible, [trials[best].drawn], generator)
        mean, deviation = predictor.predict(encode_all(self._space, (trials[number].drawn for number in numbers)))
        upper = float((mean + np.sqrt(beta) * deviation).min())
        regret = scale * max(0.0, upper + float(promise(encode_all(self._space, [lowest]))[0]))
        threshold = self._gain.threshold(losses[best])
        if regret >= threshold:
            return ""
        return (
            f"ended early after {len(trials)} trials: better settings would gain at most {regret:.3g}, less than the "
            f"{threshold:.3g} of stop.gain {self._gain.text}, with 90% probability; a larger budget goes on"
        )
