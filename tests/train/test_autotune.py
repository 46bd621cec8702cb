"""The search for settings, on a simulated machine with known rates, and on the real one with the tiny model."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from posttrain.jobs.task import TaskContext
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, WorkError
from posttrain.train.autotune import as_overrides, autotune_settings, search
from posttrain.train.config import TrainConfig
from posttrain.train.recovery import RecoveryLog
from posttrain.train.standalone import TrainJobConfig
from posttrain.train.trial import OUT_OF_MEMORY, Settings, ShortTraining, Trial, TrialRunner

Rate = Callable[[Settings], float | str]


@dataclass
class Machine:
    """A simulated machine with a known rate, or problem, for each setting.

    Args:
        rate: tokens per second, or the problem of a setting.
        noise: deviation of the logarithm of a trial's rate.
        seconds: duration of a trial.
        compiling: seconds that compilation takes at the start.
        wait: share of a step spent waiting for data.
    """

    rate: Rate
    noise: float = 0.0
    seconds: float = 10.0
    compiling: float = 0.0
    wait: float = 0.0
    now: float = 0.0
    measured_settings: list[Settings] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def measure(self, settings: Settings, floor: float, seconds: float) -> Trial:
        self.measured_settings.append(dict(settings))
        duration = min(self.seconds, seconds)
        self.now += duration
        result = self.rate(settings)
        if isinstance(result, str):
            return Trial(settings, seconds=duration, problem=result)
        rates = tuple(result * np.exp(self.noise * self.rng.standard_normal()) for _ in range(4))
        start = self.compiling if settings["compile"] else 0.0
        memory = 1_000_000 * settings["micro_batch_tokens"]
        return Trial(settings, rates, 8192, start, memory, self.wait, duration)

    def search(self, seconds: float = 600.0, steps: int = 10_000, **train: Any) -> Any:
        config = TrainConfig.read({"micro_batch_tokens": 1024, **train}, "here")
        return search(config, self.measure, seconds, steps, lambda: self.now)


def saturating(settings: Settings) -> float | str:
    """Larger micro-batches are faster up to 4096 tokens, and compiling gives a fifth."""
    tokens = settings["micro_batch_tokens"]
    return min(tokens, 4096) ** 0.5 * (0.8 if tokens > 4096 else 1.0) * (1.2 if settings["compile"] else 1.0)


def test_the_search_finds_the_best_setting() -> None:
    machine = Machine(saturating)
    result = machine.search()
    assert (result.settings["micro_batch_tokens"], result.settings["compile"]) == (4096, True)
    assert result.before == pytest.approx(32)
    assert result.after == pytest.approx(64 * 1.2)
    assert "train.micro_batch_tokens=4096" in as_overrides(result)
    assert "train.compile=true" in as_overrides(result)


def test_smaller_micro_batches_are_tried_if_larger_ones_are_slower() -> None:
    tuned = Machine(lambda settings: 1e6 / settings["micro_batch_tokens"]).search()
    assert tuned.settings["micro_batch_tokens"] == 256


def test_halving_starts_at_the_tokens_of_a_step() -> None:
    machine = Machine(lambda settings: 5000.0 if settings["micro_batch_tokens"] == 4096 else 3000.0)
    assert machine.search(micro_batch_tokens=1_000_000).settings["micro_batch_tokens"] == 4096
    assert machine.measured_settings[1]["micro_batch_tokens"] == 4096


def test_a_micro_batch_never_exceeds_the_tokens_of_a_step() -> None:
    machine = Machine(lambda settings: float(settings["micro_batch_tokens"]))
    assert machine.search().settings["micro_batch_tokens"] == 8192
    assert max(settings["micro_batch_tokens"] for settings in machine.measured_settings) == 8192


def test_a_short_training_is_not_compiled() -> None:
    assert Machine(saturating, compiling=600.0).search(steps=10).settings["compile"] is False
    assert Machine(saturating, compiling=600.0).search(steps=10_000).settings["compile"] is True


def test_crashing_settings_are_never_chosen() -> None:
    def rate(settings: Settings) -> float | str:
        if settings["compile"]:
            return "crashed by SIGSEGV"
        return OUT_OF_MEMORY if settings["micro_batch_tokens"] > 2048 else saturating(settings)

    machine = Machine(rate)
    tuned = machine.search()
    assert (tuned.settings["micro_batch_tokens"], tuned.settings["compile"]) == (2048, False)
    assert {item.problem for item in tuned.trials} == {"", OUT_OF_MEMORY, "crashed by SIGSEGV"}


def test_a_config_out_of_memory_is_reduced_first() -> None:
    tuned = Machine(lambda settings: OUT_OF_MEMORY if settings["micro_batch_tokens"] > 300 else 5.0).search()
    assert tuned.settings["micro_batch_tokens"] == 256
    assert (tuned.before, tuned.after) == (0.0, 5.0)


def test_the_loader_is_tuned_only_if_the_model_waits_for_data() -> None:
    def rate(settings: Settings) -> float:
        return saturating(settings) * (1.5 if settings.get("loader.prefetch") == 8 else 1.0)

    assert Machine(rate, wait=0.0).search().settings["loader.prefetch"] != 8
    assert Machine(rate, wait=0.2).search().settings["loader.prefetch"] == 8


def test_activations_are_recomputed_only_if_memory_is_short() -> None:
    def rate(settings: Settings) -> float | str:
        tokens, recompute = settings["micro_batch_tokens"], settings["recompute"] == "full"
        if tokens > (4096 if recompute else 1024):
            return OUT_OF_MEMORY
        return float(tokens) * (0.8 if recompute else 1.0)

    result = Machine(rate).search(seconds=2000.0).settings
    assert (result["micro_batch_tokens"], result["recompute"]) == (4096, "full")
    machine = Machine(saturating)
    machine.search()
    assert {settings["recompute"] for settings in machine.measured_settings} == {"none"}


@pytest.mark.parametrize("seconds", [5.0, 30.0, 120.0, 600.0])
def test_a_search_keeps_its_time_limit(seconds: float) -> None:
    machine = Machine(lambda settings: float(settings["micro_batch_tokens"]), noise=0.3, seconds=7.0)
    machine.search(seconds)
    assert machine.now <= seconds


def test_time_without_a_final_comparison_goes_into_the_search() -> None:
    """Trials of 28 of 90 seconds: only one would fit before the best two are measured in turns."""
    machine = Machine(saturating, seconds=28.0)
    tuned = machine.search(90.0)
    assert len(tuned.trials) == 3
    assert tuned.after > tuned.before
    short = Machine(lambda settings: OUT_OF_MEMORY if settings["micro_batch_tokens"] > 512 else 5.0, seconds=40.0)
    assert short.search(90.0).settings["micro_batch_tokens"] == 512


def test_a_noisy_search_seldom_chooses_a_worse_setting() -> None:
    """With deviations of 30% a step, as on a shared machine, a worse setting seldom wins in 40 searches."""
    bad_results = 0
    for seed in range(40):
        machine = Machine(saturating, noise=0.3, rng=np.random.default_rng(seed))
        result = machine.search(seconds=600.0).settings
        bad_results += saturating(result) < 0.8 * 64 * 1.2  # type: ignore[operator]
    assert bad_results <= 4


def test_of_two_equally_fast_settings_the_smaller_wins() -> None:
    """The larger setting is better by 4% in the search, and by 1% when both are measured in turns."""
    measured_tokens: list[int] = []

    def rate(settings: Settings) -> float:
        tokens = settings["micro_batch_tokens"]
        measured_tokens.append(tokens)
        repeated = measured_tokens.count(tokens) > 1
        return {1024: 100.0, 2048: 101.0 if repeated else 104.0}.get(tokens, 50.0) - 30 * settings["compile"]

    tuned = Machine(rate).search()
    assert tuned.settings["micro_batch_tokens"] == 1024
    assert measured_tokens.count(2048) > 2


def test_a_search_without_a_measurement_is_an_error() -> None:
    with pytest.raises(WorkError, match=r"no setting could be measured in 600 s: out of memory"):
        Machine(lambda settings: OUT_OF_MEMORY).search()


def test_a_user_error_passes_through_the_search() -> None:
    def measure(settings: Settings, floor: float, seconds: float) -> Trial:
        raise UserError("record 1: it has no answer")

    with pytest.raises(UserError, match="it has no answer"):
        search(TrainConfig(), measure, 100.0, 10)


@pytest.fixture
def job() -> TrainJobConfig:
    train = {"batch_size": 10, "micro_batch_tokens": 256, "precision": "float32", "epochs": 2}
    return TrainJobConfig.read({"model": "tiny", "data": "none", "train": train}, "here")


@pytest.mark.long
def test_the_written_config_is_valid(
    tiny_model: Path, records: pa.Table, job: TrainJobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real search: separate processes, one of which crashes."""

    def train(context: TaskContext) -> UserError | None:
        config, _ = context.argument
        if config.micro_batch_tokens == 512:
            os.abort()
        return ShortTraining(tiny_model, records, job.task, 3)(context)

    monkeypatch.setattr("posttrain.train.autotune._CHOICES", ())
    measure = TrialRunner(tmp_path / "trial", tiny_model, records, job.train, job.task, 3, train)
    out = tmp_path / "out"
    result = autotune_settings(out, job, records, lambda folder: tiny_model, 120.0, measure)
    failed_trials = [item for item in result.trials if item.problem]
    assert [item.settings["micro_batch_tokens"] for item in failed_trials] == [512]
    assert failed_trials[0].problem.startswith("crashed by SIGABRT")
    assert result.after > 0
    assert all(item.memory_bytes > 0 for item in result.trials if not item.problem)
    assert {path.name for path in out.iterdir()} == {"config.yaml", "autotune.json"}
    saved_config = TrainJobConfig.read(yaml.safe_load((out / "config.yaml").read_text()), "config.yaml")
    assert saved_config.train.micro_batch_tokens == result.settings["micro_batch_tokens"] == 256
    assert saved_config.model_copy(update={"train": job.train}) == job
    assert len(json.loads((out / "autotune.json").read_text())) == len(result.trials)
    assert not (tmp_path / "trial" / "training" / "out" / "model.safetensors").exists()


@pytest.fixture
def runner_of(
    tiny_model: Path, records: pa.Table, job: TrainJobConfig, tmp_path: Path
) -> Callable[[Callable[[TaskContext], Any]], TrialRunner]:
    """Returns a runner with another function in place of the training."""
    return lambda train: TrialRunner(tmp_path / "trial", tiny_model, records, job.train, TaskConfig(), 3, train)


@pytest.mark.slow
def test_a_hanging_trial_is_stopped(runner_of: Callable[..., TrialRunner]) -> None:
    trial = runner_of(lambda context: time.sleep(60))({"micro_batch_tokens": 512}, 0.0, 1.0)
    assert trial.problem == "no step was over after 1 s"
    assert trial.seconds < 10


@pytest.mark.slow
def test_a_clearly_slower_trial_is_stopped(runner_of: Callable[..., TrialRunner]) -> None:
    """The process sends slow steps, and would continue for a minute."""
    step = SimpleNamespace(seconds=1.0, tokens_per_second=10.0, tokens=10, memory_bytes=5, data_wait=0.0)

    def train(context: TaskContext) -> None:
        for count in range(1, 60):
            if not context.send((step,) * count):
                return
            time.sleep(1)

    trial = runner_of(train)({"micro_batch_tokens": 512}, 11.0, 30.0)
    assert trial.seconds < 20
    assert trial.rates == (10.0, 10.0)
    assert trial.memory_bytes == 5


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "examples"), [(3.0, 1), (120.0, 10)])
def test_steps_that_take_too_long_are_made_smaller(
    seconds: float, examples: int, runner_of: Callable[..., TrialRunner]
) -> None:
    """An example takes a quarter of a second: five steps of ten are over after 12.5 s."""

    def train(context: TaskContext) -> None:
        config, most = context.argument
        size = config.batch_size
        step = SimpleNamespace(
            seconds=0.25 * size, tokens_per_second=40.0, tokens=10 * size, memory_bytes=5, data_wait=0.0
        )
        for count in range(1, most + 1):
            time.sleep(0.01)
            if not context.send((step,) * count):
                return

    trial = runner_of(train)({"micro_batch_tokens": 512, "compile": False}, 0.0, seconds)
    assert (trial.problem, trial.tokens) == ("", 10 * examples)
    assert trial.rates == (40.0,) * 4


@pytest.mark.slow
def test_what_was_measured_counts_where_the_time_ends(runner_of: Callable[..., TrialRunner]) -> None:
    step = SimpleNamespace(seconds=0.1, tokens_per_second=40.0, tokens=4, memory_bytes=5, data_wait=0.0)

    def train(context: TaskContext) -> None:
        if context.argument[0].batch_size == 1:
            context.send((step,))
        time.sleep(60)

    assert runner_of(train)({"micro_batch_tokens": 512}, 0.0, 2.0).rates == (40.0,)


@pytest.mark.slow
def test_an_unusable_record_is_a_one_line_error(
    tiny_model: Path, job: TrainJobConfig, tmp_path: Path, make_records: Callable[..., pa.Table]
) -> None:
    records = make_records([("hi", None)])
    measure = TrialRunner(tmp_path / "trial", tiny_model, records, job.train, TaskConfig(), 3)
    with pytest.raises(UserError, match="it has no answer and no text to learn") as caught:
        measure({"micro_batch_tokens": 512}, 0.0, 60.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("kill", OUT_OF_MEMORY),
        ("CUDA out of memory. Tried to allocate 2 GiB", OUT_OF_MEMORY),
        ("the disk is on fire", "the disk is on fire"),
        ("exit", "ended its process with exit code 3"),
    ],
)
def test_the_problem_of_a_trial_is_reported(runner_of: Callable[..., TrialRunner], how: str, problem: str) -> None:
    def train(context: TaskContext) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        raise WorkError(how)

    assert runner_of(train)({"micro_batch_tokens": 512}, 0.0, 60.0).problem == problem


def test_a_trial_that_reduced_its_micro_batches_ran_out_of_memory(runner_of: Callable[..., TrialRunner]) -> None:
    log = json.dumps(asdict(RecoveryLog(fitting_budget=64)))  # the process need not import torch

    def train(context: TaskContext) -> None:
        (context.folder / "scratch").mkdir(parents=True)
        (context.folder / "scratch" / "notes.json").write_text(log)

    assert runner_of(train)({"micro_batch_tokens": 512}, 0.0, 60.0).problem == OUT_OF_MEMORY


def test_the_search_starts_from_an_automatic_micro_batch() -> None:
    """The process reports the micro-batch that it chose."""

    def measure(settings: Settings, floor: float, seconds: float) -> Trial:
        tokens = 600 if settings["micro_batch_tokens"] == "auto" else settings["micro_batch_tokens"]
        return Trial({**settings, "micro_batch_tokens": tokens}, (float(min(tokens, 2400)),) * 4, 8192, seconds=1.0)

    tuned = search(TrainConfig(micro_batch_tokens="auto"), measure, 100.0, 1000)
    assert tuned.settings["micro_batch_tokens"] == 2400
    with pytest.raises(WorkError):
        search(TrainConfig(), lambda settings, floor, seconds: Trial(settings, problem=OUT_OF_MEMORY), 100.0, 10)


def test_a_folder_with_other_files_is_refused(job: TrainJobConfig, records: pa.Table, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(UserError, match="holds something else already"):
        autotune_settings(tmp_path, job, records, lambda folder: folder, 60.0)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
