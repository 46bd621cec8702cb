"""A training that is gone on with after something has changed: said, refused, and with ``fork`` done all the same."""

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


def changed(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    values = config.model_dump(mode="json")
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    return TrainConfig.read(values, "train")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def train(tiny_model: Path, records: pa.Table, config: TrainConfig, out: Path) -> Train:
    """``train(epochs=3)``: the training in its folder, with changes to the config."""

    def train(
        *, model: Path | None = None, data: pa.Table | None = None, fork: bool = False, **changes: Any
    ) -> dict[str, Any]:
        settings = TrainJobConfig(
            model="tiny", data="a.jsonl", task=TaskConfig(system="Name the intent."), train=changed(config, changes)
        )
        return train_standalone(out, settings, data or records, lambda folder: model or tiny_model, fork=fork)

    return train


@pytest.fixture
def begun(train: Train) -> Train:
    """The training after three of its six steps."""
    save = Checkpoints.save

    def killed(self: Checkpoints, step: int, *arguments: Any, **options: Any) -> bool:
        save(self, step, *arguments, **options)
        if step == 3:
            raise Killed
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", killed)
        with pytest.raises(Killed):
            train()
    return train


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def trained_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that are saved from here on."""
    saved: list[int] = []
    save = Checkpoints.save

    def noted(self: Checkpoints, step: int, *arguments: Any, **options: Any) -> bool:
        saved.append(step)
        return save(self, step, *arguments, **options)

    monkeypatch.setattr(Checkpoints, "save", noted)
    return saved


def test_nothing_has_changed(begun: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = trained_steps(monkeypatch)
    assert begun()["steps"] == 6
    assert saved == [4, 5], "what was done is not done again, and the last step needs no checkpoint"


def test_what_cannot_change_the_outcome_needs_no_fork(begun: Train) -> None:
    assert begun(loader={"workers": 0, "prefetch": 1, "processes": 1})["steps"] == 6


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "config": ({"learning_rate": 1e-5}, "`train.learning_rate` was 0.003 and is 1e-05"),
    "deep in the config": ({"optimizer": {"weight_decay": 0.5}}, "`train.optimizer.weight_decay` was 0.01 and is 0.5"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_config(begun: Train, out: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    changes, says = CHANGES[what]
    before = contents(out)
    with pytest.raises(UserError) as caught:
        begun(**changes)
    assert says in str(caught.value)
    assert "--fork" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(out) == before
    saved = trained_steps(monkeypatch)
    assert begun(fork=True, **changes)["steps"] == 6
    assert saved == [4, 5]


def test_other_data(begun: Train, records: pa.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    less = records.slice(0, 9)
    with pytest.raises(UserError, match="the content of the data has changed"):
        begun(data=less)
    saved = trained_steps(monkeypatch)
    assert begun(data=less, fork=True)["examples"] == 9
    assert saved == [4, 5]


def test_other_code(begun: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "__version__", "99.0")
    with pytest.raises(UserError, match=r'`version` was ".*" and is "99.0"'):
        begun()
    assert begun(fork=True)["steps"] == 6


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"width": 64}, r"`model\.embed_tokens\.weight` is \[261, 96\] in it and \[261, 64\] here"),
        ({"layers": 3}, r"`model\.layers\.2\.[a-z_.]+\.weight` is missing in it and \[\d+, \d+\] here"),
        ({"layers": 1}, r"`model\.layers\.1\.[a-z_.]+\.weight` is \[\d+, \d+\] in it and missing here"),
    ],
)
def test_a_checkpoint_of_another_architecture(
    begun: Train, out: Path, tmp_path: Path, shape: dict[str, int], says: str
) -> None:
    """The model's folder holds something else than before."""
    other = write_tiny_model(tmp_path / "other", **shape)
    before = contents(out)
    with pytest.raises(UserError, match=f"the checkpoint is of another model: {says}") as caught:
        begun(model=other)
    assert "\n" not in str(caught.value)
    assert {name: content for name, content in contents(out).items() if "step-" in name} == {
        name: content for name, content in before.items() if "step-" in name
    }, "it is still there for the model that it is of"
    assert begun()["steps"] == 6


def test_a_curriculum_that_the_checkpoint_knows_nothing_of(begun: Train) -> None:
    with pytest.raises(UserError, match=r"train\.stages\.0: .* has seen 0 steps .* the config's would have seen 3 "):
        begun(fork=True, curriculum={"name": "adaptive"})


def test_a_checkpoint_of_another_optimiser(begun: Train) -> None:
    with pytest.raises(UserError, match="is not this optimiser's"):
        begun(fork=True, optimizer={"name": "sgd"})


def test_changed_files_of_this_program(begun: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(standalone, "_code_digest", lambda: "other")
        with pytest.raises(UserError, match="the content of the code has changed"):
            begun()
        patch.setattr(standalone, "version", lambda name: "99")
        with pytest.raises(UserError, match=r'`libraries\.torch` was "2.*" and is "99"'):
            begun()
    assert begun()["steps"] == 6


def test_a_finished_training_cannot_be_forked(begun: Train) -> None:
    begun()
    for fork in (False, True):
        with pytest.raises(UserError, match=r"is done, and was begun otherwise: `train\.epochs` was 2 and is 3; name"):
            begun(fork=fork, epochs=3)


def test_fewer_steps_than_are_done(begun: Train) -> None:
    with pytest.raises(UserError, match="3 steps are done already, and this config has 2"):
        begun(fork=True, batch_size=10)
    assert begun(fork=True)["steps"] == 6


@pytest.mark.parametrize(
    "changes", [{"ema": {"decay": 0.9}}, {"precision": "float16"}, {"precision": "bfloat16"}, {"recompute": "full"}]
)
def test_forks_that_keep_more_than_the_checkpoint_has(begun: Train, changes: dict[str, Any]) -> None:
    assert begun(fork=True, **changes)["steps"] == 6
