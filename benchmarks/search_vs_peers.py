"""Compares searches by the compute that they need to reach a target, ours and the peers' on the same problems.

    python benchmarks/search_vs_peers.py --smac OTHER/bin/python --syne-tune THIRD/bin/python
        [--problems branin hartmann conditional "round 3" levy rosenbrock] [--seeds 20] [--out FILE] [--pictures DIR]

SMAC3 and syne-tune have virtual environments of their own (``pip install smac==2.4.1``, ``pip install
"syne-tune[gpsearchers]==0.16.0"``); Optuna is a dependency of ours. Problems are functions (`search_problems.py`), and
the tasks of ``curves.csv``, such as "round 3": curves that `record_curves.py` has recorded are replayed part by
part on a simulated clock with one worker. "warm" searches start from studies of the earlier tasks, of `EARLIER` trials
each, that the same search made in turn; their compute does not count.
Compute is counted in whole trials, as parts of a training are all of one length. A run ends when a value is within 1%
of the best, as seen from a random point's, or its compute is spent.

A line of JSON for each run goes to FILE, which the next call does not repeat; then comes a table: the share of runs
that reach the target, the median compute, and ours over the peer's compute: the ratio of the sums over seeds, with a
95% bootstrap interval over seeds, and the p-value of Wilcoxon's signed-rank test of the pairs. Runs that do not reach
the target count with all their compute. Pictures show the share of runs that have reached the target by compute.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from curve_pictures import save_chart
from scipy.stats import wilcoxon
from search_problems import Parameter, Problem, Trace, problem

from posttrain.report.charts.chart import SERIES, Chart, series_colour, ticks, value_axis
from posttrain.tune.api import optimize
from posttrain.tune.goal import Goal
from posttrain.tune.parameters import Choice, Float, Int
from posttrain.tune.runs import CurvePoint, replay
from posttrain.tune.space import Space
from posttrain.tune.transfer.past import PastStudy
from posttrain.tune.transfer.warm_start import Transfer

HERE = Path(__file__).parent

PROBLEMS = ("branin", "hartmann", "conditional", "round 3", "levy", "rosenbrock")

EARLIER = 30

OURS = "posttrain"


def space_of(problem: Problem) -> Space:
    """Returns the space of a problem, for ours."""

    def entry(parameter: Parameter) -> Any:
        when = None if parameter.parent is None else "{} == '{}'".format(*parameter.parent)
        if parameter.kind == "choice":
            return Choice(list(parameter.values), when=when)
        if parameter.kind == "int":
            return Int(int(parameter.low), int(parameter.high), when=when)
        return Float(parameter.low, parameter.high, when=when)

    return Space.of({name: entry(parameter) for name, parameter in problem.space.items()})


class _Over(BaseException):
    """Ends a run whose target is reached."""


def run_warm(sampler: Any, scheduler: Any, subject: Problem, seed: int) -> float | None:
    """Returns the same of a search that starts from the studies of the earlier problems."""
    past: list[PastStudy] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(subject.earlier):
            earlier, out = problem(name), Path(folder, str(number))

            def curve(settings: Any, earlier: Problem = earlier) -> Iterator[CurvePoint]:
                return map(CurvePoint, earlier.curve(settings))

            optimize(
                partial(replay, curve),
                Goal(space_of(earlier)),
                budget=EARLIER,
                sampler=sampler,
                scheduler=scheduler,
                seed=seed,
                out=out,
                transfer=Transfer(past),
            )
            past.append(PastStudy.read(out, name))
        return run_ours(sampler, scheduler, subject, seed, past)


def run_ours(sampler: Any, scheduler: Any, problem: Problem, seed: int, past: Sequence[PastStudy] = ()) -> float | None:
    """Returns the whole trials until the target, with a sampler and a scheduler of ours."""
    trace = Trace(problem)

    def curve(settings: Any) -> Iterator[CurvePoint]:
        for value in problem.curve(settings):
            if trace.is_over:
                raise _Over
            trace.add(value)
            yield CurvePoint(value)

    with suppress(_Over):
        optimize(
            lambda: replay(curve),
            Goal(space_of(problem)),
            budget=100_000,
            sampler=sampler,
            scheduler=scheduler,
            seed=seed,
            transfer=Transfer(past),
        )
    return trace.trials


def run_optuna(
    sampler: Callable[[int], Any], pruner: Callable[[Problem], Any], problem: Problem, seed: int
) -> float | None:
    """Returns the whole trials until the target, with Optuna."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trace = Trace(problem)
    study = optuna.create_study(sampler=sampler(seed), pruner=pruner(problem))
    while not trace.is_over:
        trial, point = study.ask(), {}
        for name, parameter in problem.space.items():
            if parameter.parent is None or point.get(parameter.parent[0]) == parameter.parent[1]:
                if parameter.kind == "choice":
                    point[name] = trial.suggest_categorical(name, parameter.values)
                elif parameter.kind == "int":
                    point[name] = trial.suggest_int(name, int(parameter.low), int(parameter.high))
                else:
                    point[name] = trial.suggest_float(name, parameter.low, parameter.high)
        state = optuna.trial.TrialState.COMPLETE
        for part, value in enumerate(problem.curve(point), 1):
            trace.add(value)
            trial.report(value, part)
            if part < problem.parts and trial.should_prune():
                state = optuna.trial.TrialState.PRUNED
                break
        study.tell(trial, None if state is optuna.trial.TrialState.PRUNED else value, state)
    return trace.trials


Search = Callable[[Problem, int], float | None]


def searches(problem: Problem) -> dict[str, Search]:
    """Returns ours and Optuna's searches for a problem, by name."""
    tpe, gp = (lambda seed: optuna.samplers.TPESampler(seed=seed)), (lambda seed: optuna.samplers.GPSampler(seed=seed))
    if problem.parts == 1:
        return {
            "random": partial(run_ours, "random", "none"),
            **{f"posttrain {name}": partial(run_ours, name, "none") for name in ("tpe", "gp")},
            "Optuna TPE": partial(run_optuna, tpe, lambda _: optuna.pruners.NopPruner()),
            "Optuna GP": partial(run_optuna, gp, lambda _: optuna.pruners.NopPruner()),
        }
    asha = {"name": "asha", "max_resource": problem.parts}

    def pruner(problem: Problem) -> Any:
        return optuna.pruners.HyperbandPruner(1, problem.parts, 3)

    return {
        "random": partial(run_ours, "random", "none"),
        "posttrain random, asha": partial(run_ours, "random", asha),
        "posttrain tpe, asha": partial(run_ours, "tpe", asha),
        "posttrain gp, asha": partial(run_ours, "gp", asha),
        "posttrain tpe, asha, warm": partial(run_warm, "tpe", asha),
        "Optuna TPE, Hyperband": partial(run_optuna, tpe, pruner),
        "Optuna GP, Hyperband": partial(run_optuna, gp, pruner),
    }


def run_all(name: str, seeds: int, peers: dict[str, str], out: Path) -> list[dict[str, Any]]:
    """Runs what is missing in ``out`` for a problem, and returns all its lines."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    lines = [line for line in lines if line["problem"] == name]
    done = {(line["search"], line["seed"]) for line in lines}

    def note(search: str, seed: int, trials: float | None) -> None:
        lines.append({"problem": name, "search": search, "seed": seed, "trials": trials})
        with out.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")

    subject = problem(name)
    for search, run in searches(subject).items():
        for seed in range(seeds):
            if (search, seed) not in done:
                note(search, seed, run(subject, seed))
    for prefix, python in peers.items():
        script = f"search_{prefix.replace('-', '').replace('3', '').lower()}.py"
        environment = os.environ | {"PYTHONPATH": str(HERE)}
        for seed in range(seeds):
            if not any(search.startswith(prefix) and done_seed == seed for search, done_seed in done):
                command = [python, str(HERE / "peers" / script), name, str(seed)]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
                for line in map(json.loads, output.splitlines()):
                    note(line["search"], seed, line["trials"])
    return lines


def ratio(ours: np.ndarray, peers: np.ndarray) -> tuple[float, float, float, float]:
    """Returns the ratio of the sums, its 95% bootstrap interval, and the p-value of the pairs."""
    generator = np.random.default_rng(0)
    rows = generator.integers(0, len(ours), (10_000, len(ours)))
    ratios = ours[rows].sum(1) / peers[rows].sum(1)
    p = 1.0 if np.array_equal(ours, peers) else float(wilcoxon(ours, peers).pvalue)
    return float(ours.sum() / peers.sum()), *map(float, np.quantile(ratios, (0.025, 0.975))), p


def runs_by_search(lines: list[dict[str, Any]], limit: float) -> dict[str, np.ndarray]:
    """Returns the compute of each seed's run, the least mean first; ``inf`` where the target was not reached."""
    runs: dict[str, dict[int, float]] = {}
    for line in lines:
        runs.setdefault(line["search"], {})[line["seed"]] = np.inf if line["trials"] is None else line["trials"]
    arrays = {search: np.array([by_seed[seed] for seed in sorted(by_seed)]) for search, by_seed in runs.items()}
    return dict(sorted(arrays.items(), key=lambda item: np.minimum(item[1], limit).sum()))


def print_table(name: str, runs: dict[str, np.ndarray], limit: float) -> None:
    """Prints the table of a problem, the least compute first."""
    spent = {search: np.minimum(trials, limit) for search, trials in runs.items()}
    best = next(search for search in spent if search.startswith(OURS))
    print(f"\n{name} (limit {limit})\n\n| search | reached | median | mean | {best} over it | p |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for search, trials in spent.items():
        reached = np.isfinite(runs[search]).mean()
        row = f"| {search} | {reached:.0%} | {np.median(trials):.1f} | {trials.mean():.1f} |"
        if search == best:
            print(row, "| |")
        else:
            value, low, high, p = ratio(spent[best], trials)
            print(row, f"{value:.2f} ({low:.2f} to {high:.2f}) | {p:.2g} |")


def draw_runs(name: str, runs: dict[str, np.ndarray], limit: float, path: Path) -> None:
    """Draws the share of runs that have reached the target by compute: of the best searches, and of random ones."""
    shown = [search for search in runs if search != "random"][: SERIES - 1]
    series: list[dict[str, object]] = []
    for rank, search in enumerate([*shown, "random"]):
        reached = sorted(trials for trials in runs[search] if np.isfinite(trials))
        steps = [(trials, (count + 1) / len(runs[search])) for count, trials in enumerate(reached)]
        colour = "$gray" if search == "random" else series_colour(rank)
        style = {"color": colour, "width": 2, "type": "solid" if search.startswith(OURS) else [6, 4]}
        data = [(0, 0.0), *steps, (limit, len(reached) / len(runs[search]))]
        line = {"type": "line", "name": search, "step": "end", "symbol": "none", "data": data}
        series.append({**line, "lineStyle": style, "color": colour})
    option = {
        "xAxis": {"type": "value", "min": 0, "max": limit, "name": "whole trials", "nameLocation": "middle"},
        "yAxis": value_axis(ticks(0, 1, 5), "{:.0%}".format),
        "tooltip": {"trigger": "axis"},
        "legend": {"data": [*shown, "random"]},
        "series": series,
    }
    title = f"Share of runs within 1% of the best by compute, {name}"
    rows = [(search, f"{np.median(np.minimum(runs[search], limit)):.1f}") for search in [*shown, "random"]]
    save_chart(Chart(title, option, 400, ("search", "median"), rows), path, 860)


def main() -> None:
    """Runs all problems and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smac")
    parser.add_argument("--syne-tune")
    parser.add_argument("--problems", nargs="+", default=PROBLEMS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("searches.jsonl"))
    parser.add_argument("--pictures", type=Path, help="folder of the pictures")
    options = parser.parse_args()
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    peers = {"SMAC3": options.smac, "syne-tune": options.syne_tune}
    for name in options.problems:
        lines = run_all(name, options.seeds, {key: python for key, python in peers.items() if python}, options.out)
        limit = problem(name).trials
        runs = runs_by_search(lines, limit)
        print_table(name, runs, limit)
        sys.stdout.flush()
        if options.pictures:
            draw_runs(name, runs, limit, options.pictures / f"search-{name.replace(' ', '-')}.svg")


if __name__ == "__main__":
    main()
