"""Synthetic records are marked and new, are the same after any interruption, and rejected items keep a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.generation.local_model import LocalModel
from posttrain.data.generation.prompts import paraphrase_prompt, parse_json, parse_list, requested_lines
from posttrain.data.records.record import RECORD, REJECTED
from posttrain.data.steps.duplicates import Exact
from posttrain.data.synthesis.config import SynthesisConfig
from posttrain.data.synthesis.synthesize import SynthesisResult, synthesize
from posttrain.models.endpoint import Endpoint, EndpointConfig
from posttrain.models.generator import Answer, Sampling, greedy_answers
from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import hold_lock
from posttrain.testing.steps import table_of

SEEDS = table_of(
    {"prompt": "Name three rivers of Europe.", "completion": "Rhine, Danube, Loire"},
    {"prompt": "Translate `good morning` into French.", "completion": "bonjour"},
    {"prompt": "Explain photosynthesis to a child.", "completion": "Plants eat light."},
    {"prompt": "Write a haiku about rain.", "completion": "..."},
)
LABEL_SEEDS = table_of(
    {"prompt": "where is my parcel", "completion": "delivery"},
    {"prompt": "it has not arrived yet", "completion": "delivery"},
    {"prompt": "I want my money back", "completion": "refund", "group": "g"},
)
VERBS = ("Sort", "Count", "Draw up", "Compare", "Summarise", "List", "Check", "Find")
NOUNS = ("five planets", "old ships", "green soups", "tax rules", "train fares", "short songs", "bird names", "towns")


class Model:
    """Replies with JSON arrays of different items, and with answers to instructions."""

    def __init__(self, count: int = 4) -> None:
        self.calls: list[str] = []
        self.count = count

    def __call__(self, prompts: Any) -> list[str | None]:
        return [self.reply(prompt[-1]["content"]) for prompt in prompts]

    def reply(self, content: str) -> str | None:
        self.calls.append(content)
        if "JSON array" not in content:
            return f"the answer to {content}"
        start = len(content) * 7 + sum(map(ord, content))
        return json.dumps([self.item(start + number * 11) for number in range(self.count)])

    def item(self, number: int) -> str:
        verb, noun = VERBS[number % 8], NOUNS[number // 8 % 8]
        return f"{verb} {noun} {' '.join(f'w{number * prime % 9973}' for prime in (3, 7, 31, 101, 499))}"


def run(folder: Path, model: Any, seeds: pa.Table = SEEDS, **settings: Any) -> SynthesisResult:
    return synthesize(seeds, SynthesisConfig(**{"records": 8, **settings}), model, folder, model="m")


def synthetic_marks(records: pa.Table) -> list[dict[str, Any]]:
    return [json.loads(meta)["synthetic"] for meta in records["meta"].to_pylist()]


def test_instructions_get_answers_and_marks(tmp_path: Path) -> None:
    outcome = run(tmp_path, Model())
    assert outcome.records.schema == RECORD
    assert outcome.records.num_rows >= 8
    ids = set(SEEDS["id"].to_pylist())
    for row, mark in zip(outcome.records.to_pylist(), synthetic_marks(outcome.records), strict=True):
        assert row["completion"] == f"the answer to {row['prompt'][0]['content']}"
        assert (mark["method"], mark["model"]) == ("instructions", "m")
        assert 0 < len(mark["seeds"]) <= 8
        assert ids & set(mark["seeds"])
        assert row["source"] == "synthetic"
    assert outcome.counts["kept"] == outcome.records.num_rows


def test_a_repeated_call_queries_nothing_and_gives_the_same(tmp_path: Path) -> None:
    first_model, second_model = Model(), Model()
    first, second = run(tmp_path, first_model), run(tmp_path, second_model)
    assert first_model.calls
    assert second_model.calls == []
    assert first.records.equals(second.records)
    assert run(tmp_path / "other", Model()).records.equals(first.records)
    assert not run(tmp_path, Model(), seed=1).records.equals(first.records)


@pytest.mark.parametrize("num_calls", [0, 1, 3, 6])
def test_a_run_resumes_after_the_model_fails(tmp_path: Path, num_calls: int) -> None:
    class FailingModel(Model):
        def reply(self, content: str) -> str | None:
            if len(self.calls) == num_calls:
                raise WorkError("power cut")
            return super().reply(content)

    expected = run(tmp_path / "whole", Model()).records
    with pytest.raises(WorkError, match="power cut"):
        run(tmp_path / "cut", FailingModel())
    assert run(tmp_path / "cut", Model()).records.equals(expected)


@pytest.mark.slow
def test_over_http_with_faults_the_result_is_the_same(
    endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "timeout", 0.4)
    monkeypatch.setattr(Endpoint, "retries", 8)
    model = Model()
    endpoint.answer = lambda messages: model.reply(messages[-1]["content"]) or ""
    server = EndpointConfig(base_url=endpoint.url, model="m")
    config = SynthesisConfig(records=8, endpoint=server)
    plain = synthesize(SEEDS, config, None, tmp_path / "plain")
    assert (plain.usage.requests, plain.usage.prompt_tokens) == (len(endpoint.requests), 7 * len(endpoint.requests))
    endpoint.faults = [429, "garbage", 500, "hang", 503]
    faulty = synthesize(SEEDS, config, None, tmp_path / "faulty")
    assert faulty.records.equals(plain.records)
    repeat = synthesize(SEEDS, config, None, tmp_path / "faulty")
    assert (repeat.usage.requests, repeat.usage.reused) == (0, faulty.usage.requests)
    assert plain.records.drop(["meta"]).equals(run(tmp_path / "local", Model()).records.drop(["meta"]))


def reasons(outcome: SynthesisResult) -> list[str]:
    return list(outcome.rejected["reason"].to_pylist())


def replying_with(*replies: str | None) -> Callable[[Any], list[str | None]]:
    """A model that gives ``replies`` to requests in order, then None; its answers are `fine`."""
    remaining = list(replies)

    def generate(prompts: Any) -> list[str | None]:
        return [
            "fine" if "JSON array" not in prompt[-1]["content"] else remaining.pop(0) if remaining else None
            for prompt in prompts
        ]

    return generate


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (None, "no reply"),
        ("Sure! Here are some tasks: 1. ...", "not as asked"),
        ('{"tasks": []}', "not as asked"),
        ('["fine words", 5]', "not as asked"),
        ('["Too short"]', "length"),
        (json.dumps(["word " * 151]), "length"),
        ('["Describe this image in words please"]', "unwanted word"),
        ('["Name three rivers of Europe!"]', "too similar"),
        ('["Now write me a haiku about rain"]', "too similar"),
    ],
)
def test_unfit_items_are_rejected_with_a_reason(tmp_path: Path, reply: str | None, reason: str) -> None:
    outcome = run(tmp_path, replying_with(reply), records=1, max_requests=1)
    assert outcome.records.num_rows == 0
    assert outcome.rejected.schema == REJECTED
    assert reasons(outcome) == [reason]
    assert outcome.counts == {"asked": 1, "written": 1, "kept": 0, f"synthesize: {reason}": 1}
    if reason == "too similar":
        assert outcome.rejected["score"][0].as_py() >= 0.7


def test_similar_items_of_one_reply_are_rejected(tmp_path: Path) -> None:
    items = ["Plan a week of cheap meals", "Plan a week of very cheap meals"]
    outcome = run(tmp_path, replying_with(json.dumps(items)), records=2, max_requests=1)
    assert [row["prompt"][0]["content"] for row in outcome.records.to_pylist()] == items[:1]
    assert "to an earlier item" in outcome.rejected["detail"][0].as_py()


def test_an_instruction_without_an_answer_is_rejected(tmp_path: Path) -> None:
    def generate(prompts: Any) -> list[str | None]:
        return ['["Plan a week of cheap meals"]' if "JSON" in prompt[-1]["content"] else " " for prompt in prompts]

    assert reasons(run(tmp_path, generate, records=1, max_requests=1)) == ["no answer"]


def test_inputs_of_each_label(tmp_path: Path) -> None:
    model = Model()
    outcome = run(tmp_path, model, LABEL_SEEDS, method="label_inputs", records=8)
    assert set(outcome.records["completion"].to_pylist()) == {"delivery", "refund"}
    by_id = dict(zip(LABEL_SEEDS["id"].to_pylist(), LABEL_SEEDS["completion"].to_pylist(), strict=True))
    for row, mark in zip(outcome.records.to_pylist(), synthetic_marks(outcome.records), strict=True):
        assert {by_id[seed] for seed in mark["seeds"]} == {row["completion"]}
    assert all("JSON array" in call for call in model.calls)


def test_paraphrases_have_the_answer_and_the_group_of_their_seed(tmp_path: Path) -> None:
    outcome = run(tmp_path, Model(), LABEL_SEEDS, method="paraphrases", records=12)
    seeds = {row["id"]: row for row in LABEL_SEEDS.to_pylist()}
    assert {mark["seeds"][0] for mark in synthetic_marks(outcome.records)} == set(seeds)
    for row, mark in zip(outcome.records.to_pylist(), synthetic_marks(outcome.records), strict=True):
        seed = seeds[mark["seeds"][0]]
        assert row["completion"] == seed["completion"]
        assert row["group"] == (seed["group"] or seed["id"])


def test_plain_texts_can_be_paraphrased(tmp_path: Path) -> None:
    outcome = run(tmp_path, Model(), table_of("one text", "another text"), method="paraphrases", records=4)
    assert outcome.records.num_rows >= 4
    assert all(row["prompt"] is None and row["text"] for row in outcome.records.to_pylist())


def test_the_steps_compare_new_records_with_the_seeds(tmp_path: Path) -> None:
    """Without words for ROUGE-L to compare, only the step `exact` finds the repetition; the seed stays."""
    seeds = table_of({"prompt": "???", "completion": "puzzled"}, {"prompt": "!!!", "completion": "loud"})
    settings = {"method": "label_inputs", "records": 2, "max_requests": 2}
    outcome = run(tmp_path, replying_with('["!!!", "!!"]', '["???"]'), seeds, per_request=2, **settings)
    assert [row["prompt"][0]["content"] for row in outcome.records.to_pylist()] == ["!!"]
    rejections = [(row["step"], row["kept"]) for row in outcome.rejected.to_pylist()]
    assert rejections == [("exact", seeds["id"][1].as_py()), ("exact", seeds["id"][0].as_py())]


def test_earlier_synthetic_records_can_be_seeds(tmp_path: Path) -> None:
    first = run(tmp_path / "a", Model()).records
    second = run(tmp_path / "b", Model(count=3), pa.concat_tables([SEEDS, first]), seed=5)
    assert set(second.records["source"].to_pylist()) == {"synthetic 2"}


@pytest.mark.parametrize(
    ("seeds", "settings", "message"),
    [
        (RECORD.empty_table(), {}, "no seed record fits"),
        (table_of("plain"), {}, "needs prompts of one user turn"),
        (table_of({"prompt": "x"}), {"method": "label_inputs"}, "needs prompts with answers"),
    ],
)
def test_unfit_seeds_raise(tmp_path: Path, seeds: pa.Table, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path / "work", Model(), seeds, **settings)
    assert not (tmp_path / "work").exists()


def test_a_missing_model_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set endpoint\.base_url"):
        run(tmp_path, None)


def test_a_run_without_a_reply_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "retries", 0)
    dead = EndpointConfig(base_url="http://127.0.0.1:9/v1", model="m")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name in ("new", "full"):
        with pytest.raises(WorkError, match="ConnectError"):
            synthesize(SEEDS, SynthesisConfig(endpoint=dead), None, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert (tmp_path / "full" / "file").exists()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "lock"), pytest.raises(UserError, match="another posttrain synthesises"):
        run(tmp_path, Model())


def test_the_output_of_the_tiny_model_is_rejected(tmp_path: Path, tiny_model: Path) -> None:
    lm = load_language_model(tiny_model, TaskConfig(max_new_tokens=4), "float32")

    def reply_to(prompts: Any) -> list[str | None]:
        return [reply.text if reply.finished else None for reply in greedy_answers(lm, prompts)]

    outcome = run(tmp_path, reply_to, records=2, max_requests=1)
    assert outcome.records.num_rows == 0
    assert outcome.counts["written"] == 1


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('["a", " b "]', ["a", "b"]),
        ('```json\n["a"]\n```', ["a"]),
        ('```\n["a",\n"b"]\n```\n', ["a", "b"]),
        ('Here: ["a"]', None),
        ("[]", None),
        ('["a", ""]', None),
        ('["\\ud800"]', None),
        ("[" * 100_000, None),
        ('"a"', None),
    ],
)
def test_json_replies_are_read_strictly(reply: str, expected: list[str] | None) -> None:
    assert parse_json(reply) == expected


def test_a_reply_without_an_array_is_read_as_lines(tmp_path: Path) -> None:
    reply = "Sure!\n1. Plan a week of cheap meals\n2) “Sort the letters of a word”\n\n- Say it in French\nThat is all."
    outcome = run(tmp_path, replying_with(reply, '["Compare two old ships"]'), records=4, max_requests=2)
    assert [row["prompt"][0]["content"] for row in outcome.records.to_pylist()] == [
        "Plan a week of cheap meals",
        "Sort the letters of a word",
        "Say it in French",
        "Compare two old ships",
    ]
    assert outcome.counts == {"asked": 2, "written": 4, "kept": 4, "read as lines": 1}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("1. a b\n2. c", ["a b", "c"]),
        ("  * one\n• two\n- three", ["one", "two", "three"]),
        ('10: "quoted"\n11. say "this" now', ["quoted", 'say "this" now']),
        ("1、一\n2、二", ["一", "二"]),
        ("no list 1. here", None),
        (
            '"1. How do I pay?"\n2. 2: "Where is it?"\n**Billing**\n* *1.\n3. 12 + 5 = ?',
            ["How do I pay?", "Where is it?", "12 + 5 = ?"],
        ),
        ("1.\n2.", None),
        ("\ud800", None),
    ],
)
def test_lists_in_replies(reply: str, expected: list[str] | None) -> None:
    assert parse_list(reply) == expected


def test_the_prompt_requests_the_form(tmp_path: Path) -> None:
    model = Model()
    run(tmp_path, model, LABEL_SEEDS, method="label_inputs", form="lines", records=4, max_requests=1)
    assert "numbered from 1 to 4" in model.calls[0]
    assert requested_lines([{"role": "user", "content": model.calls[0]}]) == 4
    assert requested_lines([{"role": "user", "content": f"{model.calls[0]} Really."}]) is None


def test_repetitive_answers_are_rejected(tmp_path: Path) -> None:
    """The default steps reject them, the steps of the caller do not."""
    repetitive_text = "it was due on Monday and then it was not " * 9

    def generate(prompts: Any) -> list[str | None]:
        is_request = ("JSON array" in prompt[-1]["content"] for prompt in prompts)
        return ['["Plan a week of cheap meals"]' if flag else repetitive_text for flag in is_request]

    outcome = run(tmp_path, generate, records=1, max_requests=1)
    assert outcome.records.num_rows == 0
    assert outcome.rejected["step"].to_pylist() == ["gopher_repetition"]
    result = synthesize(
        SEEDS, SynthesisConfig(records=1, max_requests=1), generate, tmp_path, model="m", steps=[Exact()]
    )
    assert result.records.num_rows == 1


def test_other_settings_query_the_model_again(tmp_path: Path) -> None:
    config = SynthesisConfig(records=4)
    models = [Model(), Model(), Model()]
    for model, tokens in zip(models, (64, 128, 64), strict=True):
        synthesize(SEEDS, config, model, tmp_path, model="m", settings={"max_tokens": tokens})
    assert [bool(model.calls) for model in models] == [True, True, False]


def test_a_local_model_stops_with_its_last_line(tiny_model: Path) -> None:
    lm = load_language_model(tiny_model, TaskConfig(), "float32")
    prompts = [paraphrase_prompt("Where is it?", 2, "lines"), paraphrase_prompt("Where is it?", 2)]
    first, second = (LocalModel(lm, max_tokens=24, seed=3)(prompts) for _ in range(2))
    assert first == second
    assert first[0] is None or first[0].count("\n") < 2
    newline = lm.tokenizer("\n", add_special_tokens=False)["input_ids"]
    word = lm.tokenizer("word", add_special_tokens=False)["input_ids"]
    local, cut = LocalModel(lm), Answer("word\nword", "length", (*word, *newline, *word))
    assert local._read(cut, Sampling(lines=2)) == "word", "the last line was cut off"
    assert local._read(cut, Sampling()) is None
    whole = Answer("word\nword", "stop", (*word, *newline, *word, min(lm.chat.stop_ids)))
    assert local._read(whole, Sampling(lines=2)) == "word\nword"
