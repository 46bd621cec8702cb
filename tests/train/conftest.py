"""Records and examples to train on."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from posttrain.data.schema import RECORD
from posttrain.models.chat import Encoded
from posttrain.models.language_model import LanguageModel, load
from posttrain.models.task import TaskConfig
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig
from posttrain.train.lessons.log_probabilities import Supervised
from posttrain.train.schedule import ScheduleConfig
from posttrain.train.trainer import Trainer
from posttrain.train.watch.values import StepValues

ANSWERED = [
    ("my card is gone", "card lost"),
    ("where is my money", "refund"),
    ("i was charged twice for one and the same thing", "refund"),
    ("hello", "x"),
    ("somebody took my card on the train to work", "card stolen"),
    ("card", "card lost"),
    ("how do i top up", "top up"),
    ("top", "top up"),
    ("money back please, it has been two weeks now", "refund"),
    ("gone", "card stolen"),
]

MakeRecords = Callable[[Sequence[tuple[str | None, str | None]]], pa.Table]


def table(rows: Sequence[tuple[str | None, str | None]]) -> pa.Table:
    """Rows of the record schema; a row without a prompt is a plain text."""
    return pa.Table.from_pylist(
        [
            {
                "id": f"{line:020x}",
                "input_id": f"{line:020x}",
                "prompt": None if prompt is None else [{"role": "user", "content": prompt}],
                "completion": None if prompt is None else answer,
                "rejected": None,
                "text": answer if prompt is None else None,
                "group": None,
                "source": "f",
                "line": line,
                "meta": "{}",
            }
            for line, (prompt, answer) in enumerate(rows, 1)
        ],
        schema=RECORD,
    )


@pytest.fixture
def make_records() -> MakeRecords:
    return table


@pytest.fixture
def records() -> pa.Table:
    """Ten labelled records of different lengths."""
    return table(ANSWERED)


@pytest.fixture
def fresh(tiny_model: Path) -> Callable[..., LanguageModel]:
    """``fresh("bfloat16")``: the tiny model as it was written, in training mode."""

    def make(dtype: str = "float32") -> LanguageModel:
        lm = load(tiny_model, TaskConfig(system="Name the intent."), dtype)
        lm.model.train()
        return lm

    return make


@pytest.fixture
def examples(fresh: Callable[..., LanguageModel]) -> list[Encoded]:
    """The ten records as token ids, all with one system message before them."""
    lm = fresh()
    return [lm.encode([{"role": "user", "content": asked}], said) for asked, said in ANSWERED]


@pytest.fixture
def config() -> TrainConfig:
    """Two epochs of three steps (batches of 4, 4 and 2) in float32, a checkpoint after every step."""
    return TrainConfig(
        epochs=2,
        batch_size=4,
        learning_rate=3e-3,
        precision="float32",
        checkpoint=CheckpointConfig(every_seconds=None, every_steps=1, background=False),
        schedule=ScheduleConfig(warmup=0.3),
    )


@pytest.fixture
def fit() -> Callable[..., list[StepValues]]:
    """``fit(lm, examples, config, seed, scratch)``: train on sequences that are encoded already."""

    def train(
        lm: LanguageModel, examples: Sequence[Encoded], config: TrainConfig, seed: int, scratch: Path
    ) -> list[StepValues]:
        if config.micro_batch_tokens == "auto":
            config = config.model_copy(update={"micro_batch_tokens": 4096})
        return Trainer(lm, Supervised([[example] for example in examples], config), config, seed, scratch).fit()

    return train
