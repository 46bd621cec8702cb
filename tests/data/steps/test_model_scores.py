"""Perplexity and instruction-following difficulty are what a plain computation gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.model_scores import Difficulty, Perplexity
from posttrain.data.steps.step import Step
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
def plain(tiny_model: Path) -> Any:
    """The tiny model and its tokenizer, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(tiny_model)


def _mean_loss(model: Any, ids: list[int], learned: int) -> float:
    """Nats a token over the last ``learned`` tokens."""
    tokens = torch.tensor([ids])
    labels = tokens.clone()
    labels[:, : len(ids) - learned] = -100
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=labels).loss)


class TestPerplexity(StepContract):
    @pytest.fixture
    def step(self, tiny_model: Path) -> Step:
        return Perplexity(model=str(tiny_model), max_perplexity=400.0)

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(*TEXTS, {"prompt": "a question", "completion": "an answer"})

    def test_it_is_that_of_transformers(self, step: Step, table: pa.Table, plain: Any) -> None:
        model, tokenizer = plain
        result = apply_step(step, table).facts["perplexity"].to_pylist()
        assert result[1:3] == [None, None]  # one token, and none
        for row, text in ((0, TEXTS[0]), (3, TEXTS[3]), (4, TEXTS[4]), (6, "a question\nan answer")):
            ids = tokenizer(text)["input_ids"]
            assert result[row] == pytest.approx(np.exp(_mean_loss(model, ids, len(ids) - 1)), rel=1e-5)

    def test_long_texts_are_read_in_windows_that_share_a_token(self, step: Step, table: pa.Table, plain: Any) -> None:
        model, tokenizer = plain
        ids = tokenizer(TEXTS[5])["input_ids"]
        assert len(ids) == 1500
        first, second = ids[:1024], ids[1023:]
        nats = _mean_loss(model, first, 1023) * 1023 + _mean_loss(model, second, 476) * 476
        result = apply_step(step, table).facts["perplexity"].to_pylist()[5]
        assert result == pytest.approx(np.exp(nats / 1499), rel=1e-5)

    def test_bounds_reject(self, step: Perplexity, table: pa.Table) -> None:
        result = apply_step(step, table).facts["perplexity"].to_pylist()
        message = sorted(item for item in result if item is not None)
        low, high = message[1], message[-2]
        outcome = apply_step(step.model_copy(update={"min_perplexity": low, "max_perplexity": high}), table)
        assert reasons(outcome) == {
            result.index(message[0]) + 1: "predictable text",
            result.index(message[-1]) + 1: "improbable text",
        }
        assert set(outcome.rejected["score"].to_pylist()) == {message[0], message[-1]}


class TestDifficulty(StepContract):
    @pytest.fixture
    def step(self, tiny_model: Path) -> Step:
        return Difficulty(model=str(tiny_model))

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(*CHATS)

    def test_it_is_the_ratio_of_perplexities(self, step: Step, table: pa.Table, plain: Any) -> None:
        model, tokenizer = plain
        outcome = apply_step(step, table)
        result = outcome.facts["ifd"].to_pylist()
        assert [row for row, item in enumerate(result) if item is None] == [3, 4, 6]
        stop = tokenizer.eos_token_id
        for row in (0, 1, 2, 5):
            turns = table["prompt"][row].as_py()
            prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            answer = [*tokenizer(CHATS[row]["completion"], add_special_tokens=False)["input_ids"], stop]
            given = np.exp(_mean_loss(model, before + answer, len(answer)))
            alone = np.exp(_mean_loss(model, [stop, *answer], len(answer)))
            assert result[row] == pytest.approx(given / alone, rel=1e-5)
        above = [row + 1 for row, item in enumerate(result) if item is not None and item > 1]
        assert lines(outcome.rejected) == above
        assert set(reasons(outcome).values()) <= {"prompt does not help"}


def test_a_model_by_name_is_the_same_model(tiny_model: Path) -> None:
    table = table_of("plain words")
    by_name, by_folder = (apply_step(Perplexity(model=model), table).facts for model in ("tiny", str(tiny_model)))
    assert by_name == by_folder


def test_the_key_tells_the_model_and_not_its_place(tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_model, tmp_path / "copy")
    here, there = Perplexity(model=str(tiny_model)), Perplexity(model="copy").located(tmp_path)
    assert here.key() == there.key() != Perplexity(model="tiny").key()
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text() + " ")
    assert here.key() != there.key()


@pytest.mark.parametrize("step", [Perplexity(model="./none"), Difficulty(model="./none")])
def test_a_missing_model_is_said_before_any_work(step: Step, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no model"):
        step.located(tmp_path)
    with pytest.raises(UserError, match="is no model"):
        step.check()
