"""Perplexity and instruction-following difficulty equal a plain computation."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.model_scores import Difficulty, Perplexity
from posttrain.data.steps.step import DataStep
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, reasons, table_of

TEXTS = ["plain words", "x", "", "zq%~" * 6, "some more plain words, 中文 too", "long " * 300]
CHATS: list[dict[str, Any]] = [
    {"prompt": "what is it?", "completion": "a thing"},
    {"prompt": "say a", "completion": "a"},
    {"prompt": "better?", "completion": "yes, much better", "rejected": "no"},
    {"prompt": "unanswered"},
    {"text": "plain text"},
    {
        "prompt": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "bye"},
        ],
        "completion": "so long",
    },
    {"prompt": "p" * 1200, "completion": "beyond the context"},
]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    """The tiny model and its tokenizer, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(tiny_model)


def _mean_loss(model: Any, ids: list[int], count: int) -> float:
    """Nats per token over the last ``count`` tokens."""
    tokens = torch.tensor([ids])
    labels = tokens.clone()
    labels[:, : len(ids) - count] = -100
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=labels).loss)


class TestPerplexity(StepContract):
    @pytest.fixture
    def step(self, tiny_model: Path) -> DataStep:
        return Perplexity(model=str(tiny_model), max_perplexity=400.0)

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(*TEXTS, {"prompt": "a question", "completion": "an answer"})

    def test_perplexity_equals_that_of_transformers(self, step: DataStep, table: pa.Table, reference: Any) -> None:
        model, tokenizer = reference
        result = apply_step(step, table).facts["perplexity"].to_pylist()
        assert result[1:3] == [None, None]  # one token, and none
        for row, text in ((0, TEXTS[0]), (3, TEXTS[3]), (4, TEXTS[4]), (6, "a question\nan answer")):
            ids = tokenizer(text)["input_ids"]
            assert result[row] == pytest.approx(np.exp(_mean_loss(model, ids, len(ids) - 1)), rel=1e-5)

    def test_long_texts_are_read_in_windows_that_share_a_token(
        self, step: DataStep, table: pa.Table, reference: Any
    ) -> None:
        model, tokenizer = reference
        ids = tokenizer(TEXTS[5])["input_ids"]
        assert len(ids) == 1500
        first_window, second_window = ids[:1024], ids[1023:]
        nats = _mean_loss(model, first_window, 1023) * 1023 + _mean_loss(model, second_window, 476) * 476
        result = apply_step(step, table).facts["perplexity"].to_pylist()[5]
        assert result == pytest.approx(np.exp(nats / 1499), rel=1e-5)

    def test_bounds_reject(self, step: Perplexity, table: pa.Table) -> None:
        result = apply_step(step, table).facts["perplexity"].to_pylist()
        ranked = sorted(item for item in result if item is not None)
        low, high = ranked[1], ranked[-2]
        outcome = apply_step(step.model_copy(update={"min_perplexity": low, "max_perplexity": high}), table)
        assert reasons(outcome) == {
            result.index(ranked[0]) + 1: "predictable text",
            result.index(ranked[-1]) + 1: "improbable text",
        }
        assert set(outcome.rejected["score"].to_pylist()) == {ranked[0], ranked[-1]}


class TestDifficulty(StepContract):
    @pytest.fixture
    def step(self, tiny_model: Path) -> DataStep:
        return Difficulty(model=str(tiny_model))

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(*CHATS)

    def test_difficulty_is_the_ratio_of_perplexities(self, step: DataStep, table: pa.Table, reference: Any) -> None:
        model, tokenizer = reference
        outcome = apply_step(step, table)
        result = outcome.facts["ifd"].to_pylist()
        assert [row for row, item in enumerate(result) if item is None] == [3, 4, 6]
        stop = tokenizer.eos_token_id
        for row in (0, 1, 2, 5):
            turns = table["prompt"][row].as_py()
            prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            answer_ids = [*tokenizer(CHATS[row]["completion"], add_special_tokens=False)["input_ids"], stop]
            conditional = np.exp(_mean_loss(model, prompt_ids + answer_ids, len(answer_ids)))
            unconditional = np.exp(_mean_loss(model, [stop, *answer_ids], len(answer_ids)))
            assert result[row] == pytest.approx(conditional / unconditional, rel=1e-5)
        above = [row + 1 for row, item in enumerate(result) if item is not None and item > 1]
        assert lines(outcome.rejected) == above
        assert set(reasons(outcome).values()) <= {"prompt does not help"}


def test_a_model_by_name_is_the_same_model(tiny_model: Path) -> None:
    table = table_of("plain words")
    by_name, by_folder = (apply_step(Perplexity(model=model), table).facts for model in ("tiny", str(tiny_model)))
    assert by_name == by_folder


def test_the_key_holds_the_model_not_its_path(tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_model, tmp_path / "copy")
    original, copy = Perplexity(model=str(tiny_model)), Perplexity(model="copy").located(tmp_path)
    assert original.key() == copy.key() != Perplexity(model="tiny").key()
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text() + " ")
    assert original.key() != copy.key()


@pytest.mark.parametrize("step", [Perplexity(model="./none"), Difficulty(model="./none")])
def test_a_missing_model_raises_before_any_work(step: DataStep, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a model"):
        step.located(tmp_path)
    with pytest.raises(UserError, match="is not a model"):
        step.check()
