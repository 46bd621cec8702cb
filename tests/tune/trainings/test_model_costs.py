"""The costs of models against transformers' own counts and files, and studies under limits."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import yaml

from posttrain.evaluate.latency import measure_latency, read_tokens
from posttrain.models.language_model import load_language_model, save_language_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.models.weight_files import read_headers
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of
from posttrain.train.config import TrainConfig
from posttrain.train.lora import add_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune import Float, Infeasible, TrialContext, minimize
from posttrain.tune.trainings.checks import check_search
from posttrain.tune.trainings.config import TuneConfig
from posttrain.tune.trainings.measured_trial import check_limits, measure_model_latency, shape_costs, untrained_model
from posttrain.tune.trainings.search import tune_trainings
from posttrain.tune.trainings.training_trial import TrainingTrial
from posttrain.tune.trial import TrialState

TRAIN = {"epochs": 1, "batch_size": 8, "precision": "float32", "prune": {"records": 4}}
LAYERS = {"train.prune.layers": {"int": [1, 4]}}
# Embeddings, last norm; of each layer queries and outputs, keys and values, the feed-forward block, two norms.
THREE_LAYERS = 262 * 96 + 3 * (2 * 96 * 96 + 2 * 96 * 32 + 3 * 96 * 288 + 2 * 96)


def rows(start: int, count: int) -> pa.Table:
    return table_of(
        *(
            {"prompt": f"message {n} about {'cards' if n % 2 else 'cash'}", "completion": "card" if n % 2 else "cash"}
            for n in range(start, start + count)
        )
    )


HELD_OUT = rows(100, 6)


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with four layers."""
    return write_tiny_model(tmp_path_factory.mktemp("deep"), layers=4)


@pytest.fixture
def study(deep_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """``study(tune, engine, out, **train)``: runs a study in ``tmp_path / out``."""
    held_out = [
        {"prompt": row["prompt"][-1]["content"], "completion": row["completion"]} for row in HELD_OUT.to_pylist()
    ]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))

    def run(tune: dict[str, Any], engine: str = "inline", out: str = "out", **train: Any) -> Any:
        values = {"model": str(deep_model), "data": "memory", "task": {"labels": ["card", "cash"]}}
        job = TrainJobConfig.read({**values, "train": {**TRAIN, **train}}, "config")
        config = TuneConfig.read({"held_out": "held.jsonl", "sampler": "random", **tune}, "tune")
        return tune_trainings(job, config, rows(0, 16), tmp_path / out, root=tmp_path, engine=engine, workers=1)

    return run


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_bytes_are_those_of_the_saved_model(tiny_model: Path, tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    lm = load_language_model(tiny_model, TaskConfig(), "float32")
    if not tied:
        lm.model.config.tie_word_embeddings = False
        lm.model.lm_head.weight = torch.nn.Parameter(lm.model.lm_head.weight.detach().clone())
    save_language_model(lm, tmp_path)
    costs = shape_costs(tmp_path, TrainConfig())
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert costs["parameters"] == model.num_parameters()
    assert costs["model_bytes"] == sum(2 * math.prod(header.shape) for header in read_headers(tmp_path).values())
    assert "adapter_parameters" not in costs


def test_the_adapter_is_counted_beside_the_merged_model(tiny_model: Path) -> None:
    train = TrainConfig.read({"method": "lora", "lora": {"rank": 3, "ranks": {"layers.0.*": 0}}}, "train")
    costs = shape_costs(tiny_model, train)
    lm = load_language_model(tiny_model, TaskConfig(), "float32")
    assert costs["parameters"] == lm.model.num_parameters()
    adapted = add_adapter(lm, train.lora).model
    assert costs["adapter_parameters"] == adapted.num_parameters(only_trainable=True) > 0
    gated = train.model_copy(update={"lora": train.lora.model_copy(update={"gates": 0.25})})
    assert shape_costs(tiny_model, gated)["adapter_parameters"] == costs["adapter_parameters"] // 4


def test_the_latency_is_the_median_of_passes_without_an_adapter(tiny_model: Path) -> None:
    lm = load_language_model(tiny_model, TaskConfig(), "float32")
    calls: list[int] = []
    lm.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    plain = measure_model_latency(lm, HELD_OUT)
    lengths = [len(lm.encode(row["prompt"], row["completion"]).ids) for row in HELD_OUT.to_pylist()]
    assert set(calls) == set(lengths)
    assert 0 < plain < 1
    adapted = add_adapter(lm, LoraConfig())
    used: list[bool] = []
    layer = next(module for name, module in adapted.model.named_modules() if name.endswith("q_proj"))
    layer.register_forward_pre_hook(lambda module, args: used.append(module.disable_adapters))
    measure_model_latency(adapted, HELD_OUT)
    assert used
    assert all(used)
    assert not layer.disable_adapters


def test_other_requests_than_conversations_can_be_timed() -> None:
    times = iter(range(1000))
    result = measure_latency({"m": 2}, [[1], [2], [3]], 1, answer=lambda model, ids: None, clock=lambda: next(times))
    assert result["m"]["latency_p50"] == 1
    assert read_tokens.__doc__


@pytest.mark.slow
def test_models_over_a_limit_are_not_trained(
    study: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    train = TrainingTrial._train

    def record(self: TrainingTrial, out: Path, config: TrainJobConfig, *arguments: Any) -> bool:
        assert config.train.prune.layers is not None
        trained.append(config.train.prune.layers)
        return train(self, out, config, *arguments)

    monkeypatch.setattr(TrainingTrial, "_train", record)
    sampler = {"name": "nsga2", "population": 2}
    # Seven points are over the limit first: more than the five failures that end a study.
    initial = [{"train.prune.layers": layers, "train.learning_rate": rate} for layers in (3, 4) for rate in RATES[:4]]
    space = {**LAYERS, "train.learning_rate": RATES}
    tune = {"space": space, "sampler": sampler, "initial": initial[:7], "limits": {"parameters": "250K"}}
    result = study({**tune, "budget": "11 trials"})
    assert [trial.state for trial in result.trials[:7]] == [TrialState.FAILED] * 7
    assert result.trials[0].error == f"parameters {THREE_LAYERS:,} is over the limit, 250,000"
    assert all(layers <= 2 for layers in trained)
    finished = [trial for trial in result.trials if trial.state is TrialState.FINISHED]
    assert len(trained) == len(finished) > 0
    assert all((trial.settings["train.prune.layers"] > 2) == bool(trial.error) for trial in result.trials)
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())
    assert best["train"]["prune"]["layers"] <= 2
    # Without the limit it is another study.
    with pytest.raises(UserError, match="the limits: not as the study was begun"):
        study({**tune, "limits": {"parameters": "1M"}, "budget": "12 trials"})


RATES = [1e-4, 3e-4, 1e-3, 3e-3]


@pytest.mark.slow
def test_the_best_model_of_all_is_not_the_best_within_the_limits(study: Callable[..., Any], tmp_path: Path) -> None:
    tune = {"space": {"train.prune.layers": [1, 2, 3, 4]}, "sampler": "grid", "budget": "4 trials"}
    free = study(tune, out="free", epochs=3, learning_rate=1e-2)
    assert free.settings["train.prune.layers"] > 2, "the best one is over the limit"
    limited = study({**tune, "limits": {"parameters": 250_000}}, epochs=3, learning_rate=1e-2)
    within = [trial.value for trial in free.trials if trial.settings["train.prune.layers"] <= 2]
    assert limited.value == min(within)


@pytest.mark.slow
def test_without_a_model_in_the_limits_there_is_no_best_one(
    study: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingTrial, "_train", lambda *arguments: pytest.fail("it trains"))
    space = {"train.learning_rate": RATES}
    result = study({"space": space, "limits": {"latency": 1e-9}, "budget": "2 trials"})
    assert result.best is None
    assert all(trial.error.startswith("latency ") for trial in result.trials)
    assert all(trial.error.endswith(" is over the limit, 1e-09") for trial in result.trials)
    assert not (tmp_path / "out" / "best.yaml").exists()


@pytest.mark.slow
def test_a_study_of_sizes_and_latency(study: Callable[..., Any], deep_model: Path) -> None:
    names = ["loss", "parameters", "adapter_parameters", "model_bytes", "latency"]
    tune = {"space": {**LAYERS, "train.lora.rank": [2, 4]}, "objectives": names, "budget": "3 trials"}
    result = study(tune, method="lora")
    assert result.front
    for trial in result.trials:
        train = TrainConfig.read(
            {
                "method": "lora",
                "prune": {"layers": trial.settings["train.prune.layers"]},
                "lora": {"rank": trial.settings["train.lora.rank"]},
            },
            "train",
        )
        costs = shape_costs(deep_model, train)
        assert trial.values[1:4] == tuple(costs[name] for name in names[1:4])
        assert 0 < trial.values[4] < 1


@pytest.mark.long
def test_trainings_over_a_limit_of_memory_are_infeasible(study: Callable[..., Any]) -> None:
    tune = {"space": {"train.learning_rate": RATES}, "budget": "1 trials"}
    over = study({**tune, "limits": {"memory_bytes": "1MB"}}, engine="processes", out="over")
    assert over.best is None
    assert over.trials[0].error.startswith("memory_bytes ")
    assert over.trials[0].error.endswith(" is over the limit, 1,000,000")
    within = study({**tune, "limits": {"memory_bytes": "1TB"}}, engine="processes", out="within")
    assert within.value > 0


@pytest.mark.parametrize(
    ("tune", "problem"),
    [
        ({"limits": {"memory_bytes": "8GB"}}, "tune.limits: `memory_bytes` of a trial is not known where all trials"),
        ({"limits": {"gpu_memory_bytes": "8GB"}}, "tune.limits: `gpu_memory_bytes` of a trial is not known where"),
    ],
)
def test_limits_that_are_not_measured_are_named(
    study: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: dict[str, Any], problem: str
) -> None:
    monkeypatch.setattr("posttrain.tune.runs.has_gpu", lambda: False)
    with pytest.raises(UserError, match=f"^{problem}"):
        study({"space": {"train.learning_rate": RATES}, "budget": 2, **tune})
    assert not (tmp_path / "out").exists()


def test_the_latency_is_known_from_the_shape(deep_model: Path) -> None:
    train = TrainConfig.read({"prune": {"layers": 2}, "method": "lora"}, "train")
    lm = untrained_model(deep_model, train, TaskConfig())
    assert (
        float(sum(weight.numel() for weight in lm.model.parameters())) == shape_costs(deep_model, train)["parameters"]
    )
    assert 0 < measure_model_latency(lm, HELD_OUT) < 1


def test_infeasible_points_end_no_study() -> None:
    def function(trial: TrialContext) -> float:
        x: float = trial["x"]
        if x > 0.2:
            raise Infeasible(f"{x:.3f} is too much")
        return x

    result = minimize(function, {"x": Float(0, 1)}, budget="30 trials", sampler="random", seed=5)
    assert len(result.trials) == 30
    assert result.value <= 0.2
    assert {trial.state for trial in result.trials if trial.settings["x"] > 0.2} == {TrialState.FAILED}
    failed = next(trial for trial in result.trials if trial.error)
    assert failed.error == f"{failed.settings['x']:.3f} is too much"

    def never(trial: TrialContext) -> float:
        raise Infeasible("no")

    assert minimize(never, {"x": Float(0, 1)}, budget="7 trials").best is None


def test_a_cost_at_its_limit_is_allowed() -> None:
    check_limits({"parameters": 10.0}, {"parameters": 10.0, "latency": 1.0})
    with pytest.raises(Infeasible, match="parameters 11 is over the limit, 10"):
        check_limits({"parameters": 11.0}, {"parameters": 10.0})


@pytest.mark.parametrize(
    ("limits", "values"),
    [
        ({"parameters": "1.5M"}, {"parameters": 1.5e6}),
        ({"parameters": "7B", "model_bytes": "14 GB"}, {"parameters": 7e9, "model_bytes": 14e9}),
        ({"model_bytes": "2KiB", "latency": 0.02}, {"model_bytes": 2048, "latency": 0.02}),
        ({"adapter_parameters": 500}, {"adapter_parameters": 500}),
        ({"memory_bytes": "8GB", "gpu_memory_bytes": "2GiB"}, {"memory_bytes": 8e9, "gpu_memory_bytes": 2**31}),
        ({}, {}),
    ],
)
def test_limits_are_read(limits: dict[str, Any], values: dict[str, float]) -> None:
    read = TuneConfig.read({"space": LAYERS, "held_out": 0.2, "limits": limits}, "tune")
    assert read.limits == values
    assert TuneConfig.read(read.model_dump(mode="json"), "tune") == read


def test_the_space_may_say_that_every_trial_trains_an_adapter() -> None:
    space = {"train.method": "lora", **LAYERS}
    section = {"space": space, "budget": "2 trials", "held_out": 0.2, "limits": {"adapter_parameters": 5}}
    base = {"model": "tiny", "data": "memory", "train": {}}
    check_search(TuneConfig.read(section, "tune"), base, TrainConfig(), has_labels=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": {"paramters": 1}}, "`paramters` cannot be limited; did you mean `parameters`?"),
        ({"limits": {"parameters": "100MB"}}, "parameters: `100MB` is not an amount; give such as 100M, in K, M"),
        ({"limits": {"model_bytes": "100M"}}, "model_bytes: `100M` is not an amount"),
        ({"limits": {"parameters": 0}}, "parameters: `0` is not an amount"),
        ({"limits": {"parameters": True}}, "parameters: `True` is not an amount"),
        ({"limits": {"latency": "fast"}}, "latency: `fast` is not an amount; give seconds"),
        ({"limits": {"adapter_parameters": 5}}, "tune.limits: `adapter_parameters` are those of LoRA"),
        (
            {"limits": {"adapter_parameters": 5}, "space": {**LAYERS, "train.method": ["lora", "full"]}},
            "tune.limits: `adapter_parameters` are those of LoRA",
        ),
        ({"objectives": ["loss", "adapter_parameters"]}, "tune.objectives: `adapter_parameters` are those of LoRA"),
        ({"objectives": ["seconds", "latency"]}, "tune.objectives: only seconds, latency: what a trial costs is least"),
        ({"objectives": ["loss", {"metric": "latency", "maximize": True}]}, "`latency` is what a trial costs"),
        ({"metric": "parameters"}, "tune.metric: only parameters: what a model costs is least if it can do nothing"),
    ],
)
def test_wrong_limits_are_named_before_any_work(
    study: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        study({"space": LAYERS, "budget": "2 trials", **changes})
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()
