"""What the reference says is computed once, kept, and checked."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, pack
from posttrain.store.errors import WorkError
from posttrain.train.config import LoraConfig
from posttrain.train.lora import add_adapter
from posttrain.train.objectives import reference as module
from posttrain.train.objectives.loss import SequenceLogProbs, sequence_log_probs
from posttrain.train.objectives.reference import reference_log_probs

pytestmark = pytest.mark.slow

UNITS: list[Unit] = [
    [TokenizedExample([5, 6, 7, said, 9], [False, False, False, True, True]) for said in (20 + number, 40)]
    for number in range(5)
]


def read(lm: LanguageModel, folder: Path, units: list[Unit] = UNITS) -> torch.Tensor:
    return reference_log_probs(lm, units, folder, 12, padded=True)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("reference-*.safetensors"))


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """``never()``: from here on nothing is to be computed."""

    def refuse(*_: Any) -> None:
        raise AssertionError("it was computed again")

    return lambda: monkeypatch.setattr(module, "_compute", refuse)


def test_it_is_computed_once(fresh: Callable[..., LanguageModel], tmp_path: Path, never: Callable[[], None]) -> None:
    result = read(fresh(), tmp_path)
    lm = fresh()
    lm.model.set_attn_implementation("eager")
    for row, unit in enumerate(UNITS):
        for side, sequence in enumerate(unit):
            with torch.no_grad():
                logits = lm.model(input_ids=torch.tensor([sequence.ids])).logits[0].log_softmax(-1)
            assert result[row, side] == pytest.approx(float(logits[2, sequence.ids[3]] + logits[3, 9]), rel=1e-5)
    never()
    assert torch.equal(read(fresh(), tmp_path), result)
    assert len(files(tmp_path)) == 1


def test_micro_batches_that_are_named_are_read_as_they_are(
    fresh: Callable[..., LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []

    def noted(units: list[Unit], *given: Any, **more: Any) -> Any:
        read.append([UNITS.index(unit) for unit in units])
        return pack(units, *given, **more)

    monkeypatch.setattr(module, "pack", noted)
    parts = iter([[3, 1], [1, 0], [0, 3]])  # the last has nothing new
    result = reference_log_probs(fresh(), UNITS, tmp_path, 10, padded=True, groups=parts)
    assert read == [[3, 1], [1, 0], [2], [4]]
    (tmp_path / "other").mkdir()
    torch.testing.assert_close(result, reference_log_probs(fresh(), UNITS, tmp_path / "other", 12, padded=True))


@pytest.mark.parametrize(
    ("room", "sizes", "budgets"), [(4, [4, 2], []), (2, [2, 2, 2], [20]), (1, [1, 1, 1, 1, 1, 1], [20, 10])]
)
def test_memory_runs_out(
    fresh: Callable[..., LanguageModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    room: int,
    sizes: list[int],
    budgets: list[int],
) -> None:
    """Groups are cut in two from there on, and every example is read all the same."""
    expected = read(fresh(), tmp_path)
    (tmp_path / "short").mkdir()
    done: list[int] = []

    def short(lm: LanguageModel, packed: Packed) -> SequenceLogProbs:
        if packed.sequences > 2 * room:
            raise torch.OutOfMemoryError("planted")
        done.append(packed.sequences // 2)
        return sequence_log_probs(lm, packed)

    monkeypatch.setattr(module, "sequence_log_probs", short)
    actual = reference_log_probs(fresh(), UNITS, tmp_path / "short", 40, padded=True, groups=[[3, 1, 0, 4], [0, 2]])
    torch.testing.assert_close(actual, expected)
    assert done == sizes
    said = [f"  out of memory: at most {budget} tokens are read at a time from here on" for budget in budgets]
    assert [line for line in caplog.messages if "memory" in line] == said


def test_memory_runs_out_for_one_example(
    fresh: Callable[..., LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(lm: LanguageModel, packed: Packed) -> SequenceLogProbs:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(module, "sequence_log_probs", never)
    with pytest.raises(WorkError, match="out of memory with one example of 10 tokens at a time; set a lower") as caught:
        read(fresh(), tmp_path)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == []


def test_other_weights_and_other_tokens_have_files_of_their_own(
    fresh: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    lm = fresh()
    result = [read(lm, tmp_path)]
    with torch.no_grad():
        next(lm.model.parameters())[7, 3] += 0.5
    result.append(read(lm, tmp_path))
    result.append(read(lm, tmp_path, UNITS[:-1]))
    changed = [[TokenizedExample(item.ids, [False, False, False, False, True]) for item in UNITS[0]], *UNITS[1:]]
    result.append(read(lm, tmp_path, changed))
    assert len(files(tmp_path)) == 4
    assert not torch.equal(result[0], result[1])
    assert torch.equal(result[1][:-1], result[2])
    assert result[3][0, 0] > result[1][0, 0]


@pytest.mark.parametrize("damage", [lambda raw: raw[:-3], lambda raw: raw[:-3] + b"\x01" + raw[-2:], lambda raw: b""])
def test_damage_is_said_and_mended(
    fresh: Callable[..., LanguageModel], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    result = read(fresh(), tmp_path)
    (file,) = files(tmp_path)
    good = file.read_bytes()
    file.write_bytes(damage(good))
    with caplog.at_level(logging.WARNING, "posttrain"):
        assert torch.equal(read(fresh(), tmp_path), result)
    assert "is damaged" in caplog.text
    assert file.read_bytes() == good


def test_an_adapter_is_switched_off(
    fresh: Callable[..., LanguageModel], tmp_path: Path, never: Callable[[], None]
) -> None:
    (tmp_path / "plain").mkdir()
    plain = read(fresh(), tmp_path / "plain")
    lm = add_adapter(fresh(), LoraConfig(rank=4))
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "lora_" in name:
                weight += 0.1
    result = read(lm, tmp_path)
    torch.testing.assert_close(result, plain, atol=1e-5, rtol=0)
    assert lm.model.training, "it is left as it was"
    never()
    read(lm, tmp_path / "plain")  # the base weights are the same, and so is what is kept of them
