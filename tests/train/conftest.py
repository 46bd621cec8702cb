"""Records and examples to train on."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.records.record import RECORD
from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.store.artifacts import LocalArtifacts
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig
from posttrain.train.data.token_set import TokenSet
from posttrain.train.data.token_writer import Block, write_shards
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.optim.schedule import ScheduleConfig
from posttrain.train.trainer import Trainer

PROMPTS_AND_ANSWERS = [
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


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Hides what exists from the search for garbage, which follows each error of memory, and from `gc.get_objects`."""
    gc.collect()
    gc.freeze()


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


def write_set(
    units: Sequence[Sequence[TokenizedExample]], folder: Path, shard_tokens: int = 2**26, block: int = 100
) -> TokenSet:
    """Writes these units to the disk as a token set."""

    def build_block(block_units: Sequence[Sequence[TokenizedExample]]) -> Block:
        sequences = [sequence for unit in block_units for sequence in unit]
        ids = [token for sequence in sequences for token in sequence.ids]
        supervised = [item for sequence in sequences for item in sequence.supervised]
        return Block(
            np.array(ids, np.int32),
            np.array(supervised, np.bool_),
            np.array([len(sequence.ids) for sequence in sequences], np.int64),
            np.array([len(unit) for unit in block_units], np.int64),
            np.zeros(len(block_units), np.bool_),
            np.array([unit[0].ids[0] for unit in block_units], np.int32),
        )

    blocks = [build_block(units[start : start + block]) for start in range(0, len(units), block)]
    records = pa.table({"id": [str(row) for row in range(len(units))]})
    store = LocalArtifacts(folder, folder / "tmp")
    with store.temporary_folder() as fresh:
        artifact = store.commit(fresh, "tokens", write_shards(blocks, records, fresh, shard_tokens))
    return TokenSet(store.path(artifact.id))


@pytest.fixture
def make_set(tmp_path: Path) -> Callable[..., TokenSet]:
    """``make_set(units, shard_tokens, block)``: a token set on the disk."""
    return lambda units, *options: write_set(units, tmp_path / "sets", *options)


def random_units(lengths: Sequence[int], seed: int = 0, sequences: int = 1) -> list[list[TokenizedExample]]:
    """Units with sequences of these lengths, random ids and random supervised tokens."""
    draws = np.random.default_rng(seed)
    return [
        [
            TokenizedExample(draws.integers(0, 1000, length).tolist(), (draws.random(length) < 0.4).tolist())
            for _ in range(sequences)
        ]
        for length in lengths
    ]


@pytest.fixture
def make_units() -> Callable[..., list[list[TokenizedExample]]]:
    """``make_units(lengths, seed, sequences)``: random units."""
    return random_units


@pytest.fixture
def make_records() -> MakeRecords:
    return table


@pytest.fixture
def records() -> pa.Table:
    """Ten labelled records of different lengths."""
    return table(PROMPTS_AND_ANSWERS)


@pytest.fixture
def fresh(tiny_model: Path) -> Callable[..., LanguageModel]:
    """``fresh("bfloat16")``: the tiny model as it is on the disk, in training mode."""

    def make(dtype: str = "float32") -> LanguageModel:
        lm = load_language_model(tiny_model, TaskConfig(system="Name the intent."), dtype)
        lm.model.train()
        return lm

    return make


@pytest.fixture
def examples(fresh: Callable[..., LanguageModel]) -> list[TokenizedExample]:
    """The ten records as token ids, all with the same system message."""
    lm = fresh()
    return [lm.encode([{"role": "user", "content": prompt}], answer) for prompt, answer in PROMPTS_AND_ANSWERS]


@pytest.fixture
def config() -> TrainConfig:
    """Two epochs of three steps (batches of 4, 4 and 2) in float32, without checkpoints."""
    return TrainConfig(
        epochs=2,
        batch_size=4,
        learning_rate=3e-3,
        precision="float32",
        checkpoint=CheckpointConfig(every_seconds=None),
        schedule=ScheduleConfig(warmup=0.3),
    )


@pytest.fixture
def checkpointed(config: TrainConfig) -> TrainConfig:
    """The same with a checkpoint after every step."""
    checkpoint = CheckpointConfig(every_seconds=None, every_steps=1, background=False)
    return config.model_copy(update={"checkpoint": checkpoint})


@pytest.fixture
def fit() -> Callable[..., list[StepValues]]:
    """``fit(lm, examples, config, seed, scratch)``: train on encoded sequences."""

    def train(
        lm: LanguageModel, examples: Sequence[TokenizedExample], config: TrainConfig, seed: int, scratch: Path
    ) -> list[StepValues]:
        if config.micro_batch_tokens == "auto":
            config = config.model_copy(update={"micro_batch_tokens": 4096})
        return Trainer(lm, SftObjective([[example] for example in examples], config), config, seed, scratch).train()

    return train
