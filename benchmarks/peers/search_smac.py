"""Runs SMAC3 on a problem with a seed, and prints the compute until the target, in whole trials.

    search_smac.py PROBLEM SEED

``search_problems`` is found by ``PYTHONPATH``. A training that was
stopped and continues costs what it had not yet trained, as ours does.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import search_problems
from ConfigSpace import Categorical, ConfigurationSpace, EqualsCondition, Float, Integer
from smac import BlackBoxFacade, HyperparameterOptimizationFacade, MultiFidelityFacade, Scenario
from smac.runhistory import TrialValue

logging.disable(logging.WARNING)

FACADES = {
    "SMAC3 random forest": HyperparameterOptimizationFacade,
    "SMAC3 Gaussian process": BlackBoxFacade,
}


def space_of(problem, seed):
    space = ConfigurationSpace(seed=seed)
    for name, parameter in problem.space.items():
        if parameter.kind == "choice":
            space.add(Categorical(name, list(parameter.values)))
        elif parameter.kind == "int":
            space.add(Integer(name, (int(parameter.low), int(parameter.high))))
        else:
            space.add(Float(name, (parameter.low, parameter.high)))
    for name, parameter in problem.space.items():
        if parameter.parent:
            space.add(EqualsCondition(space[name], space[parameter.parent[0]], parameter.parent[1]))
    return space


def run(problem, facade, seed, output):
    trace = search_problems.Trace(problem)
    budgets = {"min_budget": 1, "max_budget": problem.parts} if facade is MultiFidelityFacade else {}
    scenario = Scenario(
        space_of(problem, seed),
        deterministic=True,
        n_trials=100_000,
        seed=seed,
        output_directory=Path(output),
        **budgets,
    )
    arguments = (
        {} if facade is MultiFidelityFacade else {"intensifier": facade.get_intensifier(scenario, max_config_calls=1)}
    )
    smac = facade(scenario, lambda config, seed=0, budget=None: 0.0, overwrite=True, logging_level=False, **arguments)
    trained = {}
    while not trace.is_over:
        info = smac.ask()
        point = dict(info.config)
        values = problem.curve(point)
        part = problem.parts if info.budget is None else round(info.budget)
        key = json.dumps(point, default=str, sort_keys=True)
        for value in values[trained.get(key, 0) : part]:
            trace.add(value)
        if part <= trained.get(key, 0) and info.budget is None:
            trace.spent += 1  # asked again for a point that it knows
        trained[key] = max(part, trained.get(key, 0))
        smac.tell(info, TrialValue(values[part - 1]), save=False)
    return trace.trials


def main():
    problem, seed = search_problems.problem(sys.argv[1]), int(sys.argv[2])
    contenders = FACADES if problem.parts == 1 else {"SMAC3 Hyperband": MultiFidelityFacade}
    for name, facade in contenders.items():
        with tempfile.TemporaryDirectory() as output:
            print(json.dumps({"search": name, "trials": run(problem, facade, seed, output)}), flush=True)


main()
