"""The problems of `search_vs_peers.py`: functions with a known best value, and recorded learning curves.

Nothing beyond the standard library is imported: the peers read this file in environments of their own.
"""

import csv
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CURVES = Path(__file__).with_name("curves.csv")

TARGET = 0.01
"""A run has reached its target when it is this share of the way from a random point's value away from the best."""


@dataclass(frozen=True)
class Parameter:
    """A parameter: a range of floats or integers, or several values; maybe only where another has a value.

    Args:
        low, high: ends of the range, both included.
        kind: ``float``, ``int`` or ``choice``.
        values: of a choice.
        parent: name and value of the parameter that it depends on.
    """

    low: float = 0.0
    high: float = 1.0
    kind: str = "float"
    values: tuple[Any, ...] = ()
    parent: tuple[str, Any] | None = None

    def draw(self, generator: random.Random) -> Any:
        """Returns a random value."""
        if self.kind == "choice":
            return generator.choice(self.values)
        if self.kind == "int":
            return generator.randint(int(self.low), int(self.high))
        return generator.uniform(self.low, self.high)


@dataclass(frozen=True)
class Problem:
    """A function to minimise.

    Args:
        name: of the problem.
        space: parameters by name.
        curve: returns the values after each part of a trial; a function has one.
        best: the least value.
        trials: compute of a run, in whole trials.
        parts: of a trial.
        earlier: names of the problems that were solved before, from which a search may learn.
    """

    name: str
    space: Mapping[str, Parameter]
    curve: Callable[[Mapping[str, Any]], list[float]]
    best: float
    trials: int
    parts: int = 1
    earlier: tuple[str, ...] = ()
    typical: float = field(init=False)

    def __post_init__(self) -> None:
        generator = random.Random(0)
        values = [self.curve(self.draw(generator))[-1] for _ in range(2001)]
        object.__setattr__(self, "typical", statistics.median(values))

    @property
    def target(self) -> float:
        """The value that ends a run."""
        return self.best + TARGET * (self.typical - self.best)

    def draw(self, generator: random.Random) -> dict[str, Any]:
        """Returns a random point."""
        point: dict[str, Any] = {}
        for name, parameter in self.space.items():
            if parameter.parent is None or point.get(parameter.parent[0]) == parameter.parent[1]:
                point[name] = parameter.draw(generator)
        return point


class Trace:
    """The compute and the values of a run, in parts of a trial.

    Args:
        problem: what is minimised.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.spent = problem, 0
        self.reached: int | None = None

    def add(self, value: float) -> None:
        """Notes that a part was trained."""
        self.spent += 1
        if value <= self.problem.target and self.reached is None:
            self.reached = self.spent

    @property
    def is_over(self) -> bool:
        """Whether the target is reached, or the compute is spent."""
        return self.reached is not None or self.spent >= self.problem.trials * self.problem.parts

    @property
    def trials(self) -> float | None:
        """Compute until the target, in whole trials; None if it was not reached."""
        return None if self.reached is None else self.reached / self.problem.parts


def branin(point: Mapping[str, Any]) -> list[float]:
    """Branin's function; its three minima are 0.397887."""
    x, y = point["x"], point["y"]
    slope = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return [slope**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10]


_A = [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
_P = [
    [0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886],
    [0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991],
    [0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650],
    [0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381],
]


def hartmann(point: Mapping[str, Any]) -> list[float]:
    """Hartmann's function of six variables; its least value is -3.32237."""
    total = 0.0
    for height, scales, centres in zip((1.0, 1.2, 3.0, 3.2), _A, _P, strict=True):
        exponent = sum(
            scale * (point[f"x{number}"] - centre) ** 2
            for number, (scale, centre) in enumerate(zip(scales, centres, strict=True))
        )
        total -= height * math.exp(-exponent)
    return [total]


def levy(point: Mapping[str, Any]) -> list[float]:
    """Levy's function of four variables, with many local minima; it is 0 where all are 1."""
    scaled = [1 + (point[f"x{number}"] - 1) / 4 for number in range(4)]
    total = math.sin(math.pi * scaled[0]) ** 2 + (scaled[-1] - 1) ** 2 * (1 + math.sin(2 * math.pi * scaled[-1]) ** 2)
    return [total + sum((w - 1) ** 2 * (1 + 10 * math.sin(math.pi * w + 1) ** 2) for w in scaled[:-1])]


def rosenbrock(point: Mapping[str, Any]) -> list[float]:
    """Rosenbrock's function of four variables, a curved valley; it is 0 where all are 1."""
    values = [point[f"x{number}"] for number in range(4)]
    return [sum(100 * (after - x**2) ** 2 + (1 - x) ** 2 for x, after in itertools.pairwise(values))]


def conditional(point: Mapping[str, Any]) -> list[float]:
    """A function whose variables depend on a choice; it is 0 at b, (0.7, 0.2, 0.5)."""
    if point["kind"] == "a":
        return [0.3 + (point["a0"] - 0.4) ** 2]
    if point["kind"] == "b":
        return [sum((point[f"b{number}"] - best) ** 2 for number, best in enumerate((0.7, 0.2, 0.5)))]
    return [0.1 + abs(point["c0"] - 0.5) + abs(point["c1"] - 0.9)]


def recorded(task: str) -> Problem:
    """Returns the problem of the curves of a task; numbers are given by their place in the grid."""
    with CURVES.open(newline="") as file:
        lines = list(csv.DictReader(file))
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    rows = [line for line in lines if line["task"] == task]
    names = [name for name in rows[0] if name.startswith("train.")]
    grid = {name: list(dict.fromkeys(row[name] for row in rows)) for name in names}
    columns = [name for name in rows[0] if name.startswith("loss ")]
    losses = {tuple(row[name] for name in names): [float(row[column]) for column in columns] for row in rows}
    finite = [value for values in losses.values() for value in values if math.isfinite(value)]
    worst = max(finite)  # of a training that has diverged
    table = {key: [value if math.isfinite(value) else worst for value in values] for key, values in losses.items()}
    numbers = {name for name in names if all(_is_number(value) for value in grid[name])}
    space = {
        name: Parameter(0, len(grid[name]) - 1, "int")
        if name in numbers
        else Parameter(kind="choice", values=tuple(grid[name]))
        for name in names
    }

    def curve(point: Mapping[str, Any]) -> list[float]:
        return table[tuple(grid[name][int(point[name])] if name in numbers else point[name] for name in names)]

    earlier = tuple(tasks[: tasks.index(task)])
    return Problem(task, space, curve, min(finite), trials=40, parts=len(columns), earlier=earlier)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def problem(name: str) -> Problem:
    """Returns a problem by its name."""
    if name == "branin":
        return Problem(name, {"x": Parameter(-5, 10), "y": Parameter(0, 15)}, branin, 0.397887, trials=200)
    if name == "hartmann":
        return Problem(name, {f"x{n}": Parameter() for n in range(6)}, hartmann, -3.32237, trials=200)
    if name == "levy":
        return Problem(name, {f"x{n}": Parameter(-10, 10) for n in range(4)}, levy, 0.0, trials=200)
    if name == "rosenbrock":
        return Problem(name, {f"x{n}": Parameter(-2, 2) for n in range(4)}, rosenbrock, 0.0, trials=200)
    if name == "conditional":
        parents = {"a0": "a", "b0": "b", "b1": "b", "b2": "b", "c0": "c", "c1": "c"}
        kind = Parameter(kind="choice", values=("a", "b", "c"))
        branches = {name: Parameter(parent=("kind", branch)) for name, branch in parents.items()}
        return Problem(name, {"kind": kind, **branches}, conditional, 0.0, trials=200)
    return recorded(name)
