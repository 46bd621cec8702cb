"""The log-probabilities of the reference are computed once, saved, and checked."""

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
from posttrain.train.lora import add_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.objectives import reference as module
from posttrain.train.objectives.loss import SequenceLogProbs, sequence_log_probs
from posttrain.train.objectives.reference import reference_log_probs

pytestmark = pytest.mark.slow

UNITS: list[Unit] = [
    [TokenizedExample([5, 6, 7, answer, 9], [False, False, False, True, True]) for answer in (20 + number, 40)]
    for number in range(5)
]


def read_reference(lm: LanguageModel, folder: Path, units: list[Unit] = UNITS) -> torch.Tensor:
    return reference_log_probs(lm, units, folder, 12, padded=True)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("reference-*.safetensors"))


@pytest.fixture
def forbid_compute(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """``forbid_compute()``: from here on any computation is an error."""

    def refuse(*_: Any) -> None:
        raise AssertionError("it was computed again")

    return lambda: monkeypatch.setattr(module, "_compute", refuse)


def test_the_reference_is_computed_once(
    fresh: Callable[..., LanguageModel], tmp_path: Path, forbid_compute: Callable[[], None]
) -> None:
    result = read_reference(fresh(), tmp_path)
    lm = fresh()
    lm.model.set_attn_implementation("eager")
    for row, unit in enumerate(UNITS):
        for column, sequence in enumerate(unit):
            with torch.no_grad():
                logits = lm.model(input_ids=torch.tensor([sequence.ids])).logits[0].log_softmax(-1)
            assert result[row, column] == pytest.approx(float(logits[2, sequence.ids[3]] + logits[3, 9]), rel=1e-5)
    forbid_compute()
    assert torch.equal(read_reference(fresh(), tmp_path), result)
    assert len(files(tmp_path)) == 1


def test_given_groups_are_read_as_they_are(
    fresh: Callable[..., LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_rows: list[list[int]] = []

    def record_rows(units: list[Unit], *arguments: Any, **options: Any) -> Any:
        packed_rows.append([UNITS.index(unit) for unit in units])
        return pack(units, *arguments, **options)

    monkeypatch.setattr(module, "pack", record_rows)
    parts = iter([[3, 1], [1, 0], [0, 3]])  # the last group has no new unit
    result = reference_log_probs(fresh(), UNITS, tmp_path, 10, padded=True, groups=parts)
    assert packed_rows == [[3, 1], [1, 0], [2], [4]]
    (tmp_path / "other").mkdir()
    torch.testing.assert_close(result, reference_log_probs(fresh(), UNITS, tmp_path / "other", 12, padded=True))


@pytest.mark.parametrize(("room", "sizes", "budgets"), [(4, [4, 2], []), (1, [1, 1, 1, 1, 1, 1], [20, 10])])
def test_out_of_memory_splits_the_groups(
    fresh: Callable[..., LanguageModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    room: int,
    sizes: list[int],
    budgets: list[int],
) -> None:
    """From there on groups are split in two, and every example is still read."""
    expected = read_reference(fresh(), tmp_path)
    (tmp_path / "short").mkdir()
    sizes_read: list[int] = []

    def limited(lm: LanguageModel, packed: Packed) -> SequenceLogProbs:
        if packed.sequences > 2 * room:
            raise torch.OutOfMemoryError("planted")
        sizes_read.append(packed.sequences // 2)
        return sequence_log_probs(lm, packed)

    monkeypatch.setattr(module, "sequence_log_probs", limited)
    actual = reference_log_probs(fresh(), UNITS, tmp_path / "short", 40, padded=True, groups=[[3, 1, 0, 4], [0, 2]])
    torch.testing.assert_close(actual, expected)
    assert sizes_read == sizes
    messages = [f"  out of memory: at most {budget} tokens are read at a time from here on" for budget in budgets]
    assert [line for line in caplog.messages if "memory" in line] == messages


def test_out_of_memory_with_one_example_is_an_error(
    fresh: Callable[..., LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(lm: LanguageModel, packed: Packed) -> SequenceLogProbs:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(module, "sequence_log_probs", run_out)
    with pytest.raises(WorkError, match="out of memory with one example of 10 tokens at a time; set a lower") as caught:
        read_reference(fresh(), tmp_path)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == []


def test_other_weights_and_other_tokens_have_separate_files(
    fresh: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    lm = fresh()
    result = [read_reference(lm, tmp_path)]
    with torch.no_grad():
        next(lm.model.parameters())[7, 3] += 0.5
    result.append(read_reference(lm, tmp_path))
    result.append(read_reference(lm, tmp_path, UNITS[:-1]))
    changed_units = [[TokenizedExample(item.ids, [False, False, False, False, True]) for item in UNITS[0]], *UNITS[1:]]
    result.append(read_reference(lm, tmp_path, changed_units))
    assert len(files(tmp_path)) == 4
    assert not torch.equal(result[0], result[1])
    assert torch.equal(result[1][:-1], result[2])
    assert result[3][0, 0] > result[1][0, 0]


@pytest.mark.parametrize("damage", [lambda raw: raw[:-3], lambda raw: raw[:-3] + b"\x01" + raw[-2:], lambda raw: b""])
def test_a_damaged_file_is_reported_and_rewritten(
    fresh: Callable[..., LanguageModel], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    result = read_reference(fresh(), tmp_path)
    (file,) = files(tmp_path)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    with caplog.at_level(logging.WARNING, "posttrain"):
        assert torch.equal(read_reference(fresh(), tmp_path), result)
    assert "is damaged" in caplog.text
    assert file.read_bytes() == content


def test_the_reference_is_computed_without_the_adapter(
    fresh: Callable[..., LanguageModel], tmp_path: Path, forbid_compute: Callable[[], None]
) -> None:
    (tmp_path / "plain").mkdir()
    expected = read_reference(fresh(), tmp_path / "plain")
    lm = add_adapter(fresh(), LoraConfig(rank=4))
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "lora_" in name:
                weight += 0.1
    result = read_reference(lm, tmp_path)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    assert lm.model.training, "the training mode is restored"
    forbid_compute()
    read_reference(lm, tmp_path / "plain")  # the base weights are the same, so their saved file is used
