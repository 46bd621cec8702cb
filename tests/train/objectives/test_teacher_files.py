"""A teacher is asked once, is not in memory while the student learns, and fits the student."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.train.objectives import teacher as module

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("distill", "files"),
    [
        ({}, {"last.npy": (128,), "head.safetensors": None}),
        ({"top_k": 4}, {"ids.npy": (4,), "log_probabilities.npy": (4,)}),
        ({"top_k": 4, "hidden": {"layers": [(1, 1), (-1, 2)]}}, {"layers.npy": (2, 128)}),
    ],
)
def test_what_is_kept(prepare: Any, tmp_path: Path, distill: dict[str, Any], files: dict[str, Any]) -> None:
    prepared = prepare("distill", {"distill": distill})
    (kept,) = tmp_path.glob("teacher-*")
    supervised = sum(sum(sequence.supervised) for unit in prepared.objective.units for sequence in unit)
    for name, shape in files.items():
        assert (kept / name).is_file()
        if shape:
            assert np.load(kept / name, mmap_mode="r").shape == (supervised, *shape)
    assert not list(kept.parent.glob("*.part"))


def test_memory_runs_out(prepare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is kept stands where it would have stood."""
    expected = prepare("distill", {"distill": {"top_k": 4}})
    (kept,) = tmp_path.glob("teacher-*")
    ids, values = (np.load(kept / name) for name in ("ids.npy", "log_probabilities.npy"))
    kept.rename(tmp_path / "before")
    most, planted, read_layers = 0, 0, module.predicting_states_of_layers

    def short(lm: LanguageModel, packed: Packed, layers: list[int]) -> Any:
        nonlocal most, planted
        if packed.sequences > 2:
            planted += 1
            raise torch.OutOfMemoryError("planted")
        most = max(most, packed.sequences)
        return read_layers(lm, packed, layers)

    monkeypatch.setattr(module, "predicting_states_of_layers", short)
    again = prepare("distill", {"distill": {"top_k": 4}})
    assert planted
    assert most == 2
    assert len(again.objective.units) == len(expected.objective.units) == 8
    np.testing.assert_array_equal(np.load(kept / "ids.npy"), ids)
    np.testing.assert_allclose(np.load(kept / "log_probabilities.npy"), values, atol=1e-5)


def test_the_teacher_runs_once_and_is_then_freed(prepare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    gc.collect()
    before = sum(type(item) is LlamaForCausalLM for item in gc.get_objects())
    first = prepare("distill", moved=False)
    gc.collect()
    assert sum(type(item) is LlamaForCausalLM for item in gc.get_objects()) == before + 1, "the student alone"
    expected = first.backward([list(range(8))])
    monkeypatch.setattr(module, "load_language_model", lambda *_: pytest.fail("it was loaded again"))
    assert prepare("distill", moved=False).backward([list(range(8))]) == expected
    (kept,) = tmp_path.glob("teacher-*")
    (kept / "what.json").unlink()  # as when it was killed before the end
    with pytest.raises(pytest.fail.Exception, match="loaded again"):
        prepare("distill", moved=False)


def test_mistakes_are_one_clear_line(prepare: Any, tmp_path: Path, other_model: Path) -> None:
    with pytest.raises(UserError, match=r"train\.distill\.teacher: no folder `nowhere`"):
        prepare("distill", teacher="nowhere")
    with pytest.raises(UserError, match="the teacher has 3 layers, and no layer 4"):
        prepare("distill_hidden", {"distill_hidden": {"layers": [(1, 4)]}})
    with pytest.raises(UserError, match="the student has 2 layers, and no layer -4"):
        prepare("distill", {"distill": {"hidden": {"layers": [(-4, 1)]}}})
    stranger = write_tiny_model(tmp_path / "stranger")
    words = (stranger / "tokenizer.json").read_text()
    (stranger / "tokenizer.json").write_text(words.replace("<|system|>", "<|sys|>"))
    with pytest.raises(UserError, match="has another tokenizer than the student"):
        prepare("distill", teacher=stranger)
