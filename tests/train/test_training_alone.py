"""A standalone training: a kill at its end, a second process in its folder, and too little memory."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.packing import Packed
from posttrain.models.task import TaskConfig
from posttrain.store import files
from posttrain.store.errors import UserError
from posttrain.train import standalone
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.standalone import TrainJobConfig, train_standalone

pytestmark = pytest.mark.slow


class Killed(BaseException):
    """Stands for the death of the process."""


@pytest.fixture
def lora(checkpointed: TrainConfig) -> TrainJobConfig:
    train = checkpointed.model_copy(update={"method": "lora"})
    return TrainJobConfig(model="tiny", data="a.jsonl", train=train)


def test_a_kill_while_moving_the_model_is_recovered(
    tiny_model: Path, records: pa.Table, lora: TrainJobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = standalone.write_atomically

    def die(path: Path, content: bytes) -> None:
        if path.name == "summary.json":
            raise Killed
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(standalone, "write_atomically", die)
        with pytest.raises(Killed):
            train_standalone(tmp_path, lora, records, tiny_model)
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert list((tmp_path / "adapter").iterdir()), "the adapter has been moved"
    assert train_standalone(tmp_path, lora, records, tiny_model)["steps"] == 6
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert len(list((tmp_path / "adapter").iterdir())) == 2
    assert [path.name for path in (tmp_path / ".training").iterdir() if path.is_dir()] == []


def test_the_model_is_synced_before_its_checkpoints_are_removed(
    tiny_model: Path, records: pa.Table, lora: TrainJobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_files: list[str] = []
    sync_file, remove_tree = files.sync_file, standalone.remove_tree

    def sync(path: Path) -> None:
        synced_files.append(path.name)
        sync_file(path)

    def remove(path: Path) -> None:
        if path.name == "scratch":
            outputs = [*tmp_path.glob("*.*"), *(tmp_path / "adapter").iterdir()]
            names = {file.name for file in outputs if file.is_file()} - {"config.yaml", "summary.json"}
            assert {"model.safetensors", "adapter_model.safetensors", "metrics.jsonl"} <= names <= set(synced_files)
            synced_files.append("checkpoints gone")
        remove_tree(path)

    monkeypatch.setattr(files, "sync_file", sync)
    monkeypatch.setattr(standalone, "sync_file", sync)
    monkeypatch.setattr(standalone, "remove_tree", remove)
    train_standalone(tmp_path, lora, records, tiny_model)
    assert "checkpoints gone" in synced_files


def test_a_second_process_in_the_folder_is_refused(
    tiny_model: Path, records: pa.Table, lora: TrainJobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []

    def fetch_once(source: str, folder: Path) -> Path:
        with pytest.raises(UserError, match="is being trained by another process") as caught:
            train_standalone(tmp_path, lora, records, tiny_model)
        messages.append(str(caught.value))
        return tiny_model

    monkeypatch.setattr(standalone, "fetch_once", fetch_once)
    assert train_standalone(tmp_path, lora, records)["steps"] == 6
    assert len(messages) == 1
    assert messages[0].startswith(str(tmp_path))


def test_the_summary_has_the_micro_batch_that_fit(
    tiny_model: Path,
    records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory runs out once."""
    loss, calls = SftObjective.loss, 0

    def run_out_once(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss(self, lm, packed, rows)

    monkeypatch.setattr(SftObjective, "loss", run_out_once)
    train = config.model_copy(update={"micro_batch_tokens": "auto"})
    settings = TrainJobConfig(model="tiny", data="a.jsonl", train=train)
    summary = train_standalone(tmp_path, settings, records, tiny_model)
    (budget,) = re.findall(r"micro-batches of at most (\d+) tokens", caplog.text)
    assert summary["micro_batch_tokens"] == int(budget) < 4096
    load_language_model(tmp_path, TaskConfig())


def test_records_are_checked_before_weights_are_fetched(
    tiny_model: Path, records: pa.Table, lora: TrainJobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / ".training").mkdir(parents=True)  # as after a kill: it is usable
    fetch_calls: list[Path] = []

    def fetch_once(source: str, folder: Path) -> Path:
        fetch_calls.append(folder)
        return tiny_model

    monkeypatch.setattr(standalone, "fetch_once", fetch_once)
    with pytest.raises(UserError, match="no labelled record"):
        train_standalone(tmp_path / "out", lora, records.slice(0, 0))
    assert not fetch_calls
    assert train_standalone(tmp_path / "out", lora, records)["steps"] == 6
    assert fetch_calls


def test_peft_loads_the_adapter_with_its_base_model(
    tiny_model: Path, records: pa.Table, lora: TrainJobConfig, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    train_standalone(tmp_path, lora.model_copy(update={"model": str(tiny_model)}), records, tiny_model)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        with_adapter = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)(
            input_ids=ids
        )
        merged = load_language_model(tmp_path, TaskConfig(), "float32").model(input_ids=ids)
    torch.testing.assert_close(merged.logits, with_adapter.logits, atol=0.1, rtol=0.05)  # one is saved in bfloat16
