"""Importance of settings: shares known in closed form, Optuna's own, and what is left out of them."""

import warnings

import numpy as np
import optuna
import pytest

from posttrain.tune.importance import MOST, fanova, measure_importance
from posttrain.tune.losses import comparable_values, worst_shown
from posttrain.tune.parameters import Choice, Float, Int
from posttrain.tune.space import Space
from posttrain.tune.storage import to_distribution, to_optuna
from posttrain.tune.trial import Report, Trial, TrialState


def trials_of(space: Space, count: int, value: object, seed: int = 0) -> list[Trial]:
    """Finished trials at random points, with the value of a function of their settings."""
    generator = np.random.default_rng(seed)
    trials = []
    for number in range(count):
        drawn = space.draw(generator)
        result = float(value(drawn))  # type: ignore[operator]
        trials.append(Trial(number, space.complete(drawn), drawn, TrialState.FINISHED, value=result))
    return trials


def optuna_study(space: Space, trials: list[Trial], maximize: bool = False) -> optuna.Study:
    study = optuna.create_study(direction="maximize" if maximize else "minimize")
    for trial in trials:
        parameters = {name: space.parameters[name] for name in trial.drawn}
        distributions = {name: to_distribution(parameter) for name, parameter in parameters.items()}
        study.add_trial(
            optuna.trial.create_trial(
                params=to_optuna(parameters, trial.drawn), distributions=distributions, value=trial.value
            )
        )
    return study


@pytest.mark.slow
def test_shares_of_an_additive_function() -> None:
    # The variance of a uniform number is 1/12 of its squared width: shares 9/14, 4/14 and 1/14, over a logarithm too.
    space = Space({"a": Float(1e-6, 1e-3, log=True), "b": Float(-1, 1), "c": Float(0, 1), "d": Float(0, 5)})
    trials = trials_of(space, 800, lambda s: np.log10(s["a"]) + s["b"] + s["c"])
    result = measure_importance(space, trials)
    assert list(result.shares)[:3] == ["a", "b", "c"]
    for name, share in {"a": 9 / 14, "b": 4 / 14, "c": 1 / 14, "d": 0}.items():
        # A forest smooths small effects away.
        assert result.shares[name] == pytest.approx(share, abs=0.03)
    assert result.fit > 0.95
    assert sum(result.shares.values()) == pytest.approx(1, abs=0.05)


def test_shares_of_choices_and_integers() -> None:
    # The variance of equally likely values is 2/3 for 0, 1, 2 and 5/4 for 0, 1, 2, 3.
    space = Space({"a": Choice(["x", "y", "z"]), "b": Int(0, 3), "c": Float(0, 1)})
    effects = {"x": 1.0, "y": 2.0, "z": 0.0}
    result = measure_importance(space, trials_of(space, 400, lambda s: effects[s["a"]] + s["b"]))
    assert result.shares["a"] == pytest.approx(8 / 23, abs=0.02)
    assert result.shares["b"] == pytest.approx(15 / 23, abs=0.02)


def test_an_interaction_is_no_share_of_one_setting() -> None:
    space = Space({"a": Float(-1, 1), "b": Float(-1, 1)})
    result = measure_importance(space, trials_of(space, 500, lambda s: s["a"] * s["b"]))
    assert sum(result.shares.values()) < 0.05
    assert result.fit > 0.8


@pytest.mark.parametrize("count", [12, 40])
def test_fanova_is_that_of_optuna_on_the_unit_cube(count: int) -> None:
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    space = Space({name: Float(0, 1) for name in "abc"})
    trials = trials_of(space, count, lambda s: 3 * s["a"] + s["b"] ** 2 + s["a"] * s["c"])
    evaluator = FanovaImportanceEvaluator(seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        expected = get_param_importances(optuna_study(space, trials), evaluator=evaluator, normalize=False)
    points = np.array([space.to_unit(trial.drawn) for trial in trials])
    shares, _ = fanova(points, np.array([trial.value for trial in trials]), seed=5)
    assert dict(zip("abc", shares, strict=True)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("maximize", [False, True])
def test_a_conditional_setting_has_no_share(maximize: bool) -> None:
    space = Space(
        {
            "rate": Float(1e-6, 1e-3, log=True),
            "method": Choice(["full", "lora"]),
            "rank": Int(4, 64, log=True, when="method == 'lora'"),
        }
    )
    sign = -1 if maximize else 1
    trials = trials_of(space, 60, lambda s: sign * ((np.log10(s["rate"]) + 4) ** 2 + 0.01 * s.get("rank", 40)))
    result = measure_importance(space, trials, maximize=maximize)
    assert set(result.shares) == {"rate", "method"}
    assert result.conditional == {"rank": sum("rank" in trial.drawn for trial in trials)}
    assert 0 < result.conditional["rank"] < 60


def test_noise_is_known_as_such() -> None:
    space = Space({name: Float(0, 1) for name in "abcd"})
    noise = np.random.default_rng(1)
    result = measure_importance(space, trials_of(space, 60, lambda s: noise.standard_normal()))
    assert result.fit < 0.1


def test_too_few_or_equal_values_have_no_importance() -> None:
    space = Space({"a": Float(0, 1)})
    few = trials_of(space, 9, lambda s: s["a"])
    assert measure_importance(space, few).count == 0
    assert len(measure_importance(space, few).compared.values) == 9
    assert measure_importance(space, trials_of(space, 30, lambda s: 1.0)).count == 0
    assert measure_importance(space, []).compared.values == {}


def test_a_setting_with_one_value_and_failed_trials_count_nothing() -> None:
    space = Space({"a": Float(0, 1), "b": Choice([1, 2])})
    trials = [
        Trial(n, {}, {"a": n / 40, "b": 1}, TrialState.FAILED if n % 4 == 0 else TrialState.FINISHED, value=n / 40)
        for n in range(40)
    ]
    result = measure_importance(space, trials)
    assert result.count == 30
    assert result.shares == pytest.approx({"a": 1, "b": 0}, abs=1e-9)
    same = [Trial(n, {}, {"a": 0.5, "b": 1}, TrialState.FINISHED, value=n / 40) for n in range(40)]
    assert measure_importance(space, same).shares == {"a": 0, "b": 0}


@pytest.mark.slow
def test_a_sample_of_many_trials_is_the_same_each_time() -> None:
    space = Space({"a": Float(0, 1), "b": Float(0, 1)})
    trials = trials_of(space, MOST + 500, lambda s: round(2 * s["a"]) + s["b"])
    result = measure_importance(space, trials)
    assert (result.count, len(result.compared.values)) == (MOST, MOST + 500)
    assert result.shares == measure_importance(space, trials).shares


def test_which_values_are_compared() -> None:
    space = Space({"a": Float(0, 1)})

    def trial(number: int, state: TrialState, *values: float) -> Trial:
        reports = tuple(Report(step, value) for step, value in enumerate(values, 1))
        return Trial(number, {}, {"a": 0.5}, state, reports, values[-1] if state is TrialState.FINISHED else None)

    finished = [trial(n, TrialState.FINISHED, 3.0, 2.0, float(n)) for n in range(12)]
    stopped = [trial(n, TrialState.STOPPED, 3.0, float(n)) for n in range(12, 40)]
    failed = [trial(40, TrialState.FAILED, 1.0, 1.0, 1.0)]
    result = comparable_values(space, [*finished, *stopped, *failed])
    assert (result.step, result.values) == (None, {n: float(n) for n in range(12)})
    # Eight that have finished are neither enough nor half of all.
    result = comparable_values(space, [*finished[:8], *stopped, *failed])
    assert result.step == 2
    assert result.values == {**dict.fromkeys(range(8), 2.0), **{n: float(n) for n in range(12, 40)}}
    assert comparable_values(space, finished[:3]).step is None


def test_a_training_that_diverged_does_not_decide_alone() -> None:
    values = np.array([*np.linspace(0.4, 0.6, 20), 900.0])
    assert worst_shown(values) == 0.6
    assert worst_shown(-values, maximize=True) == -0.6
    assert worst_shown(np.random.default_rng(0).standard_normal(1000)) < 4
    assert worst_shown(np.array([1.0, 1.0, 1.0, 1.0, 7.0])) == 7.0
    space = Space({"a": Float(0, 1), "b": Float(0, 1)})
    trials = trials_of(space, 60, lambda s: 900.0 if s["b"] > 0.95 else s["a"])
    result = measure_importance(space, trials)
    assert result.capped == sum(trial.value == 900 for trial in trials) > 0
    assert result.limit < 1
    assert result.shares["a"] > 0.7
