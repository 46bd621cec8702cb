"""A teacher is run once, is not in memory while the student learns, and must fit the student."""

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
    ("settings", "files"),
    [
        ({}, {"last.npy": (128,), "head.safetensors": None}),
        ({"top_k": 4}, {"ids.npy": (4,), "log_probabilities.npy": (4,)}),
        ({"top_k": 4, "hidden_weight": 1.0, "layers": [(1, 1), (-1, 2)]}, {"layers.npy": (2, 128)}),
    ],
)
def test_the_saved_teacher_outputs(
    prepare: Any, tmp_path: Path, settings: dict[str, Any], files: dict[str, Any]
) -> None:
    prepared = prepare("distill", settings)
    (folder,) = tmp_path.glob("teacher-*")
    supervised = sum(sum(sequence.supervised) for unit in prepared.objective.units for sequence in unit)
    for name, shape in files.items():
        assert (folder / name).is_file()
        if shape:
            assert np.load(folder / name, mmap_mode="r").shape == (supervised, *shape)
    assert not list(folder.parent.glob("*.part"))


def test_out_of_memory_splits_the_teachers_micro_batches(
    prepare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The saved outputs keep their order when the micro-batches are split."""
    expected = prepare("distill", {"top_k": 4})
    (folder,) = tmp_path.glob("teacher-*")
    ids, values = (np.load(folder / name) for name in ("ids.npy", "log_probabilities.npy"))
    folder.rename(tmp_path / "before")
    largest, error_count, read_layers = 0, 0, module.predicting_states_of_layers

    def limited(lm: LanguageModel, packed: Packed, layers: list[int]) -> Any:
        nonlocal largest, error_count
        if packed.sequences > 2:
            error_count += 1
            raise torch.OutOfMemoryError("planted")
        largest = max(largest, packed.sequences)
        return read_layers(lm, packed, layers)

    monkeypatch.setattr(module, "predicting_states_of_layers", limited)
    actual = prepare("distill", {"top_k": 4})
    assert error_count
    assert largest == 2
    assert len(actual.objective.units) == len(expected.objective.units) == 8
    np.testing.assert_array_equal(np.load(folder / "ids.npy"), ids)
    np.testing.assert_allclose(np.load(folder / "log_probabilities.npy"), values, atol=1e-5)


def test_the_teacher_runs_once_and_is_then_freed(prepare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    gc.freeze()  # nothing older is counted
    first = prepare("distill", moved=False)
    gc.collect()
    assert sum(type(item) is LlamaForCausalLM for item in gc.get_objects()) == 1, "only the student is new"
    expected = first.backward([list(range(8))])
    monkeypatch.setattr(module, "load_language_model", lambda *_: pytest.fail("it was loaded again"))
    assert prepare("distill", moved=False).backward([list(range(8))]) == expected
    (folder,) = tmp_path.glob("teacher-*")
    (folder / "what.json").unlink()  # as after a kill before the end
    with pytest.raises(pytest.fail.Exception, match="loaded again"):
        prepare("distill", moved=False)


def test_teacher_mistakes_are_one_line_errors(prepare: Any, tmp_path: Path, other_model: Path) -> None:
    with pytest.raises(UserError, match=r"train\.objective\.teacher: no folder `nowhere`"):
        prepare("distill", teacher="nowhere")
    with pytest.raises(UserError, match="the teacher has 3 layers, and no layer 4"):
        prepare("distill", {"divergence": "none", "layers": [(1, 4)]})
    with pytest.raises(UserError, match="the student has 2 layers, and no layer -4"):
        prepare("distill", {"hidden_weight": 1.0, "layers": [(-4, 1)]})
    other_teacher = write_tiny_model(tmp_path / "stranger")
    tokenizer_json = (other_teacher / "tokenizer.json").read_text()
    (other_teacher / "tokenizer.json").write_text(tokenizer_json.replace("<|system|>", "<|sys|>"))
    with pytest.raises(UserError, match="has another tokenizer than the student"):
        prepare("distill", teacher=other_teacher)
