import numpy as np
import pytest

from posttrain.evaluate.latency import measure_latency

PROMPTS = [[{"role": "user", "content": "x" * length}] for length in range(1, 33)]


class Machine:
    """A simulated clock: answers take seconds by prompt length, plus noise."""

    def __init__(self, seed: int = 0, noise: float = 0.0, stalls: float = 0.0, drift: float = 0.0) -> None:
        self.now = 0.0
        self.generator = np.random.default_rng(seed)
        self.noise, self.stalls, self.drift = noise, stalls, drift
        self.calls: list[tuple[float, int]] = []

    def clock(self) -> float:
        return self.now

    def answer(self, speed: float, prompt: list[dict[str, str]]) -> None:
        length = len(prompt[0]["content"])
        self.calls.append((speed, length))
        seconds = speed * (80 + length) / 1000 * (1 + self.generator.exponential(self.noise))
        seconds += self.generator.exponential(0.3) * (self.generator.random() < self.stalls)
        self.now += seconds * (1 + self.drift * self.now)


def measure(machine: Machine, models: dict[str, float], repeats: int = 16) -> dict[str, dict[str, float]]:
    return measure_latency(models, PROMPTS, repeats, answer=machine.answer, clock=machine.clock)


def test_percentiles_of_a_quiet_machine_are_exact() -> None:
    result = measure(Machine(), {"candidate": 1.0, "champion": 2.0})
    seconds = (80 + np.arange(1, 33)) / 1000
    for name, speed in (("candidate", 1.0), ("champion", 2.0)):
        assert result[name]["latency_p50"] == pytest.approx(speed * np.percentile(seconds, 50))
        assert result[name]["latency_p90"] == pytest.approx(speed * np.percentile(seconds, 90))
        assert result[name]["latency_p99"] == pytest.approx(speed * np.percentile(seconds, 99))
        assert result[name]["n"] == 32


def test_equal_models_measure_equal_on_a_noisy_machine() -> None:
    ratios = []
    for seed in range(40):
        result = measure(Machine(seed, noise=0.05, stalls=0.02), {"candidate": 1.0, "champion": 1.0})
        ratios.append(result["candidate"]["latency_p99"] / result["champion"]["latency_p99"])
    assert np.abs(np.array(ratios) - 1).max() < 0.05
    assert abs(np.mean(ratios) - 1) < 0.01


def test_a_machine_that_slows_down_affects_both_models_equally() -> None:
    result = measure(Machine(drift=0.02), {"candidate": 1.0, "champion": 1.0})
    assert result["candidate"]["latency_p99"] == pytest.approx(result["champion"]["latency_p99"], rel=0.03)
    assert result["candidate"]["latency_p50"] == pytest.approx(result["champion"]["latency_p50"], rel=0.03)


def test_a_slower_model_measures_slower_despite_the_noise() -> None:
    for seed in range(20):
        result = measure(Machine(seed, noise=0.05, stalls=0.02), {"candidate": 1.2, "champion": 1.0})
        assert 1.12 < result["candidate"]["latency_p99"] / result["champion"]["latency_p99"] < 1.28


def test_models_alternate_and_neither_is_always_first() -> None:
    machine = Machine()
    measure(machine, {"candidate": 1.0, "champion": 2.0}, repeats=1)
    order = [speed for speed, _ in machine.calls[2:]]
    assert len(order) == 4 * 32
    groups = [tuple(order[start : start + 4]) for start in range(0, len(order), 4)]
    assert groups[0] == (1, 2, 2, 1)
    assert groups[1] == (2, 1, 1, 2)


def test_only_the_slowest_prompts_are_repeated_until_they_are_stable() -> None:
    machine = Machine()
    measure(machine, {"candidate": 1.0, "champion": 2.0})
    lengths = [length for _, length in machine.calls[2 + 4 * 32 :]]
    assert set(lengths) == {29, 30, 31, 32}
    assert len(lengths) == 4 * 4 * 4
    noisy = Machine(seed=1, noise=3.0)
    measure(noisy, {"candidate": 1.0, "champion": 1.0}, repeats=6)
    assert len(lengths) < len(noisy.calls) - 2 - 4 * 32 <= 5 * 8 * 4


def test_one_model_no_model_and_no_prompt_are_allowed() -> None:
    assert set(measure(Machine(), {"candidate": 1.0})) == {"candidate"}
    assert measure(Machine(), {}) == {}
    assert measure_latency({"candidate": 1.0}, [], 3, answer=Machine().answer) == {}
