"""Runs syne-tune's searches on a problem with a seed, and prints the compute until the target, in whole trials.

    search_synetune.py PROBLEM SEED

``search_problems`` is found by ``PYTHONPATH``. Its spaces have no
conditions: variables that do not exist are drawn and ignored.
"""

import datetime
import json
import logging
import sys
import warnings

import numpy as np
import search_problems
from syne_tune.backend.trial_status import Trial
from syne_tune.config_space import choice, randint, uniform
from syne_tune.optimizer.baselines import ASHA, ASHABORE, BOHB, BORE, TPE
from syne_tune.optimizer.scheduler import SchedulerDecision

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")


def space_of(problem):
    space = {}
    for name, parameter in problem.space.items():
        if parameter.kind == "choice":
            space[name] = choice(list(parameter.values))
        elif parameter.kind == "int":
            space[name] = randint(int(parameter.low), int(parameter.high))
        else:
            space[name] = uniform(parameter.low, parameter.high)
    return space


def run(problem, make, seed):
    np.random.seed(seed)
    trace, scheduler, number = search_problems.Trace(problem), make(space_of(problem), seed, problem.parts), 0
    while not trace.is_over:
        suggestion = scheduler.suggest()
        if suggestion is None:
            return None  # every point of the space was proposed
        trial = Trial(number, suggestion.config, datetime.datetime.now())
        number += 1
        scheduler.on_trial_add(trial)
        values = problem.curve(suggestion.config)
        for part, value in enumerate(values, 1):
            trace.add(value)
            result = {"loss": value, "part": part}
            if part == len(values):
                scheduler.on_trial_complete(trial, result)
            elif scheduler.on_trial_result(trial, result) == SchedulerDecision.STOP:
                break
    return trace.trials


def multi_fidelity(kind):
    def make(space, seed, parts):
        return kind(
            space, metric="loss", time_attr="part", max_t=parts, grace_period=1, reduction_factor=3, random_seed=seed
        )

    return make


def single(kind):
    return lambda space, seed, parts: kind(space, metric="loss", random_seed=seed)


FUNCTIONS = {"syne-tune TPE": single(TPE), "syne-tune BORE": single(BORE)}
CURVES = {
    "syne-tune ASHA": multi_fidelity(ASHA),
    "syne-tune BOHB": multi_fidelity(BOHB),
    "syne-tune ASHA with BORE": multi_fidelity(ASHABORE),
}


def main():
    problem, seed = search_problems.problem(sys.argv[1]), int(sys.argv[2])
    for name, make in (FUNCTIONS if problem.parts == 1 else CURVES).items():
        print(json.dumps({"search": name, "trials": run(problem, make, seed)}), flush=True)


main()
