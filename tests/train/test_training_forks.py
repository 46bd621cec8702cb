"""Resuming a training after a change: it is refused with the reason, and allowed with ``fork``."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.train import standalone
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.config import TrainConfig
from posttrain.train.standalone import TrainJobConfig, train_standalone

pytestmark = pytest.mark.slow

Train = Callable[..., dict[str, Any]]


class Killed(BaseException):
    """Stands for the death of the process."""


def with_changes(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    values = config.model_dump(mode="json")
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    return TrainConfig.read(values, "train")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def train(tiny_model: Path, records: pa.Table, checkpointed: TrainConfig, out: Path) -> Train:
    """``train(epochs=3)``: runs the training in its folder, with changes to the config."""

    def train(
        *, model: Path | None = None, data: pa.Table | None = None, fork: bool = False, **changes: Any
    ) -> dict[str, Any]:
        settings = TrainJobConfig(
            model="tiny",
            data="a.jsonl",
            task=TaskConfig(system="Name the intent."),
            train=with_changes(checkpointed, changes),
        )
        return train_standalone(out, settings, data or records, model or tiny_model, fork=fork)

    return train


@pytest.fixture(scope="module")
def killed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the training after three of its six steps, filled by the first test that needs it."""
    return tmp_path_factory.mktemp("killed") / "out"


@pytest.fixture
def interrupted_training(train: Train, out: Path, killed_folder: Path) -> Train:
    """The training after three of its six steps."""
    if killed_folder.exists():
        shutil.copytree(killed_folder, out)
        return train
    save = Checkpoints.save

    def save_and_die(self: Checkpoints, step: int, *arguments: Any, **options: Any) -> bool:
        save(self, step, *arguments, **options)
        if step == 3:
            raise Killed
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_die)
        with pytest.raises(Killed):
            train()
    shutil.copytree(out, killed_folder)
    return train


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def record_saved_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list of steps that are saved from here on."""
    steps: list[int] = []
    save = Checkpoints.save

    def record_step(self: Checkpoints, step: int, *arguments: Any, **options: Any) -> bool:
        steps.append(step)
        return save(self, step, *arguments, **options)

    monkeypatch.setattr(Checkpoints, "save", record_step)
    return steps


def test_an_unchanged_training_resumes(interrupted_training: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = record_saved_steps(monkeypatch)
    assert interrupted_training()["steps"] == 6
    assert steps == [4, 5], "finished steps are not repeated, and the last step needs no checkpoint"


def test_settings_without_effect_on_the_output_need_no_fork(interrupted_training: Train) -> None:
    assert interrupted_training(loader={"workers": 0, "prefetch": 1, "processes": 1})["steps"] == 6


def test_another_config_needs_a_fork(interrupted_training: Train, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"learning_rate": 1e-5, "optimizer": {"weight_decay": 0.5}}
    before = contents(out)
    with pytest.raises(UserError) as caught:
        interrupted_training(**changes)
    assert "`train.learning_rate` was 0.003 and is 1e-05" in str(caught.value)
    assert "`train.optimizer.weight_decay` was 0.01 and is 0.5" in str(caught.value)
    assert "--fork" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(out) == before
    steps = record_saved_steps(monkeypatch)
    assert interrupted_training(fork=True, **changes)["steps"] == 6
    assert steps == [4, 5]


def test_other_data_need_a_fork(
    interrupted_training: Train, records: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer_records = records.slice(0, 9)
    with pytest.raises(UserError, match="the content of the data has changed"):
        interrupted_training(data=fewer_records)
    steps = record_saved_steps(monkeypatch)
    assert interrupted_training(data=fewer_records, fork=True)["examples"] == 9
    assert steps == [4, 5]


def test_another_version_needs_a_fork(interrupted_training: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "__version__", "99.0")
    with pytest.raises(UserError, match=r'`version` was ".*" and is "99.0"'):
        interrupted_training()
    assert interrupted_training(fork=True)["steps"] == 6


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"width": 64}, r"`model\.embed_tokens\.weight` is \[261, 96\] in it and \[261, 64\] here"),
        ({"layers": 1}, r"`model\.layers\.1\.[a-z_.]+\.weight` is \[\d+, \d+\] in it and missing here"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(
    interrupted_training: Train, out: Path, tmp_path: Path, shape: dict[str, int], message: str
) -> None:
    """The model's folder now holds a model of another shape."""
    other_model = write_tiny_model(tmp_path / "other", **shape)
    before = contents(out)
    with pytest.raises(UserError, match=f"the checkpoint is of another model: {message}") as caught:
        interrupted_training(model=other_model)
    assert "\n" not in str(caught.value)
    assert {name: content for name, content in contents(out).items() if "step-" in name} == {
        name: content for name, content in before.items() if "step-" in name
    }, "the checkpoint is kept for its own model"
    assert interrupted_training()["steps"] == 6


def test_a_new_curriculum_is_refused_even_with_fork(interrupted_training: Train) -> None:
    with pytest.raises(UserError, match=r"train\.phases\.0: .* has seen 0 steps .* the config's would have seen 3 "):
        interrupted_training(fork=True, phases=[{"epochs": 2, "curriculum": {"name": "adaptive"}}])


def test_a_checkpoint_of_another_optimizer_is_refused(interrupted_training: Train) -> None:
    with pytest.raises(UserError, match="is not this optimiser's"):
        interrupted_training(fork=True, optimizer={"name": "sgd"})


def test_changed_code_or_libraries_need_a_fork(interrupted_training: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(standalone, "_code_digest", lambda: "other")
        with pytest.raises(UserError, match="the content of the code has changed"):
            interrupted_training()
        patch.setattr(standalone, "version", lambda name: "99")
        with pytest.raises(UserError, match=r'`libraries\.torch` was "2.*" and is "99"'):
            interrupted_training()
    assert interrupted_training()["steps"] == 6


def test_a_finished_training_cannot_be_forked(interrupted_training: Train) -> None:
    interrupted_training()
    for fork in (False, True):
        with pytest.raises(
            UserError, match=r"is done, and began with other settings: `train\.epochs` was 2 and is 3; name"
        ):
            interrupted_training(fork=fork, epochs=3)


def test_fewer_steps_than_finished_are_refused(interrupted_training: Train) -> None:
    with pytest.raises(UserError, match="3 steps are done already, and this config has 2"):
        interrupted_training(fork=True, batch_size=10)
    assert interrupted_training(fork=True)["steps"] == 6


@pytest.mark.parametrize("changes", [{"precision": "float16"}, {"recompute": "full"}])
def test_a_fork_may_need_state_that_the_checkpoint_lacks(interrupted_training: Train, changes: dict[str, Any]) -> None:
    assert interrupted_training(fork=True, **changes)["steps"] == 6
