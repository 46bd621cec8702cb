"""Paraphrases by a model, queried once however the table is cut."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.augment.rewording import Paraphrase, paraphrase_texts
from posttrain.data.steps.augment import Augment
from posttrain.data.steps.step import DataStep
from posttrain.models.endpoint import EndpointConfig
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, table_of


def reword(messages: list[dict[str, str]]) -> str:
    content = messages[-1]["content"]
    message = json.loads(content.splitlines()[2])
    return json.dumps([f"{message}, they said", f"he said: {message}"]) if message != "odd" else "no array"


class TestParaphrase(StepContract):
    adds_rows = True

    @pytest.fixture
    def step(self, endpoint: Any, tmp_path: Path) -> DataStep:
        endpoint.answer = reword
        server = EndpointConfig(base_url=endpoint.url, model="m")
        step = Augment(methods=(Paraphrase(endpoint=server, copies=2),)).located(tmp_path)
        step.check()
        return step

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            {"prompt": "one", "completion": "1"},
            {"prompt": "odd", "completion": "?"},
            {"prompt": "two", "completion": "2"},
            {"prompt": "one", "completion": "uno"},
        )

    def test_each_copy_is_an_item_of_one_reply(self, step: Augment, table: pa.Table, endpoint: Any) -> None:
        texts = [row["prompt"][0]["content"] for row in step.apply(table).kept.to_pylist()]
        copies_of_one, copies_of_two = (
            ["one", "one, they said", "he said: one"],
            ["two", "two, they said", "he said: two"],
        )
        assert texts == [*copies_of_one, "odd", *copies_of_two, *copies_of_one]
        assert len(endpoint.requests) == 3
        step.apply(table.slice(3))
        assert len(endpoint.requests) == 3

    def test_check_raises_without_a_key(self, tmp_path: Path) -> None:
        server = EndpointConfig(base_url="http://127.0.0.1:9", model="m", key_variable="NOT_SET_ANYWHERE")
        with pytest.raises(UserError, match="NOT_SET_ANYWHERE"):
            Augment(methods=(Paraphrase(endpoint=server, replies=tmp_path),)).check()


def test_any_model_can_paraphrase() -> None:
    def generate(prompts: Any) -> list[str | None]:
        return [None if "gone" in prompt[0]["content"] else '["other words"]' for prompt in prompts]

    assert paraphrase_texts(["a", "gone", "a"], generate) == ["other words", None, "other words"]
