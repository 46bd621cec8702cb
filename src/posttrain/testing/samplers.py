"""The contract of samplers, as a test class to inherit from.

class TestNearest(SamplerContract):
    @pytest.fixture
    def make(self):
        return NearestSampler
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from posttrain.tune.parameters import Choice, Derived, Float, Int
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.space import Space
from posttrain.tune.trial import Report, Trial, TrialState

MakeSampler = Callable[[Space, int, bool], Sampler]

SPACE = Space(
    {
        "rate": Float(1e-6, 1e-3, log=True),
        "method": Choice(["full", "lora"]),
        "rank": Int(4, 64, log=True, when="method == 'lora'"),
        "alpha": Derived("2 * rank"),
        "batch": Choice([8, 16, 32]),
        "accumulation": Int(1, 8),
        "epochs": 3,
    },
    ["batch * accumulation <= 128"],
)
"""A space with every kind of entry."""


def loss(settings: Mapping[str, Any]) -> float:
    """Returns a loss over `SPACE`; least at a rate of 1e-4 with rank 16 and a batch of 16."""
    rank = settings.get("rank", 200)
    return float(np.log10(settings["rate"] * 1e4) ** 2 + np.log2(rank / 16) ** 2 / 10 + (settings["batch"] != 16))


class SamplerContract:
    """Tests what every sampler promises; inherit and define the fixture ``make``: space, seed, maximize to a `Sampler`.

    A sampler proposes points of the space that meet its constraints; its proposals follow from seed and trials alone,
    so that a new one continues where another was; it changes no trial; it copes with trials that run, are paused or
    have failed; and to maximise a value is to minimise its negative.

    Attributes:
        trials: number of trials that are proposed; enough for the sampler to use what it has learned.
        objectives: number of objectives; ``make`` gets the direction of all.
    """

    trials: int = 24
    objectives: int = 1

    @pytest.fixture
    def make(self) -> MakeSampler:
        """Returns what makes a sampler."""
        raise NotImplementedError

    def test_proposals_are_points_of_the_space(self, make: MakeSampler) -> None:
        trials = self._study(make(SPACE, 1, False), self.trials)
        assert trials
        for trial in trials:
            assert trial.settings in SPACE, trial.settings

    def test_a_new_sampler_goes_on_where_another_was(self, make: MakeSampler) -> None:
        first, trials = make(SPACE, 3, False), list[Trial]()
        for number in range(self.trials):
            proposal = first.propose(number, trials)
            if number % 5 == 0 or number == self.trials - 1:
                assert make(SPACE, 3, False).propose(number, list(trials)) == proposal
            if proposal is None:
                return
            trials.append(self._run(number, proposal))

    def test_the_seed_counts(self, make: MakeSampler) -> None:
        first, second = (self._study(make(SPACE, 3, False), self.trials) for _ in range(2))
        assert first == second

    def test_trials_in_every_state(self, make: MakeSampler) -> None:
        sampler, trials = make(SPACE, 5, False), list[Trial]()
        for number in range(self.trials):
            proposal = sampler.propose(number, trials)
            if proposal is None:
                break
            trial = self._run(number, proposal)
            reports = tuple(Report(step, (trial.value or 0.0) + 1 / step, others=trial.others) for step in range(1, 4))
            changed = [
                trial,
                replace(trial, state=TrialState.RUNNING, value=None),
                replace(trial, state=TrialState.RUNNING, value=None, reports=reports),
                replace(trial, state=TrialState.PAUSED, value=None, reports=reports),
                replace(trial, state=TrialState.PAUSED, value=None),
                replace(trial, state=TrialState.STOPPED, value=reports[-1].value, reports=reports),
                replace(trial, state=TrialState.FAILED, value=None, error="out of memory"),
            ]
            trials.append(changed[number % len(changed)])
            # A paused trial is promoted, and ends.
            if number >= 3 and trials[number - 3].state is TrialState.PAUSED:
                trials[number - 3] = replace(trials[number - 3], state=TrialState.FINISHED, value=1.0)
        assert all(trial.settings in SPACE for trial in trials)

    def test_maximising_is_minimising_the_negative(self, make: MakeSampler) -> None:
        least = self._study(make(SPACE, 7, False), self.trials)
        greatest = self._study(make(SPACE, 7, True), self.trials, sign=-1)
        assert [trial.settings for trial in least] == [trial.settings for trial in greatest]

    def test_trials_stay_unchanged(self, make: MakeSampler) -> None:
        trials = self._study(make(SPACE, 9, False), self.trials // 2)
        before = [repr(trial) for trial in trials]
        make(SPACE, 9, False).propose(len(trials), trials)
        assert [repr(trial) for trial in trials] == before

    def _run(self, number: int, proposal: Proposal, sign: int = 1) -> Trial:
        settings = SPACE.complete(proposal.drawn)
        values = [sign * loss(settings), sign * -float(np.log10(settings["rate"]))]
        others = tuple(values[1 : self.objectives])
        state = TrialState.FINISHED
        return Trial(number, settings, proposal.drawn, state, value=values[0], notes=proposal.notes, others=others)

    def _study(self, sampler: Sampler, count: int, sign: int = 1) -> Sequence[Trial]:
        trials: list[Trial] = []
        for number in range(count):
            proposal = sampler.propose(number, trials)
            if proposal is None:
                break
            trials.append(self._run(number, proposal, sign))
        return trials
