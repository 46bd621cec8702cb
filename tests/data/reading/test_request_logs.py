"""Logs of OpenAI-style requests become records; failed requests are skipped and counted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.reading.reader import check_file, read
from posttrain.data.reading.rows import Problem
from posttrain.data.records.record import concat
from posttrain.store.errors import UserError

REQUEST = {"model": "gpt-x", "temperature": 0.5, "messages": [{"role": "user", "content": "Where?"}]}
RESPONSE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt-x-2026",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Here."}, "finish_reason": "stop"}],
    "usage": {"total_tokens": 7},
}
META = {
    "id": "chatcmpl-1",
    "created": 1,
    "model": "gpt-x-2026",
    "requested_model": "gpt-x",
    "temperature": 0.5,
    "usage": {"total_tokens": 7},
    "finish_reason": "stop",
}


def records(folder: Path, *rows: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Problem]]:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems: list[Problem] = []
    return concat(list(read(path, name="log.jsonl", skipped=problems.append))).to_pylist(), problems


def response_with(**changes: Any) -> dict[str, Any]:
    return {**RESPONSE, **changes}


def choice(**message: Any) -> dict[str, Any]:
    return response_with(choices=[{"message": message}])


@pytest.mark.parametrize(
    ("row", "meta"),
    [
        ({"request": REQUEST, "response": RESPONSE}, META),
        ({"body": REQUEST, "response": RESPONSE}, META),
        ({"request": json.dumps(REQUEST), "response": json.dumps(RESPONSE), "error": None}, META),
        ({"request": {"method": "POST", "body": REQUEST}, "response": {"status_code": 200, "body": RESPONSE}}, META),
        (
            {
                "id": "batch_req_1",
                "custom_id": "row-1",
                "method": "POST",
                "body": REQUEST,
                "response": {"status_code": 200, "request_id": "r", "body": RESPONSE},
                "error": None,
            },
            {**META, "id": "batch_req_1", "custom_id": "row-1", "method": "POST", "response_id": "chatcmpl-1"},
        ),
        (
            {**REQUEST, **{name: value for name, value in RESPONSE.items() if name != "object"}},
            {name: value for name, value in META.items() if name != "requested_model"},
        ),
        (
            {
                "request": {"model": "m", "prompt": "Where?"},
                "response": {"id": "c", "choices": [{"text": "Here.", "finish_reason": "length"}]},
                "latency": 3,
            },
            {"model": "m", "id": "c", "finish_reason": "length", "latency": 3},
        ),
    ],
)
def test_a_request_and_its_response_become_a_record(tmp_path: Path, row: dict[str, Any], meta: dict[str, Any]) -> None:
    result, problems = records(tmp_path, row)
    assert not problems
    assert result[0]["prompt"] == [{"role": "user", "content": "Where?"}]
    assert result[0]["completion"] == "Here."
    assert json.loads(result[0]["meta"]) == meta


def test_developer_turns_and_parts_of_text(tmp_path: Path) -> None:
    turns = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Where"}, {"type": "text", "text": "is it?"}]},
    ]
    result, _ = records(tmp_path, {"request": {"messages": turns}, "response": RESPONSE})
    assert [turn["role"] for turn in result[0]["prompt"]] == ["system", "user"]
    assert result[0]["prompt"][1]["content"] == "Where\nis it?"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"error": {"message": "rate limit"}}, "failed request", "the request failed: rate limit"),
        ({"response": {"error": {"code": "bad"}}}, "failed request", "the request failed: bad"),
        ({"response": None}, "failed request", "there is no response but null"),
        ({"response": {"status_code": 500, "body": {}}}, "failed request", "the request failed with the status 500"),
        ({"response": response_with(choices=[])}, "failed request", "the response holds no choices"),
        ({"response": choice(content=None, refusal="No.")}, "failed request", "the model refused"),
        ({"response": choice(content=" ")}, "failed request", "the answer is empty"),
        ({"response": choice(content=None, tool_calls=[{"id": 1}])}, "tool calls", "the answer calls tools"),
        (
            {"response": response_with(choices=[{"finish_reason": "content_filter", "message": {"content": "x"}}])},
            "failed request",
            "a content filter stopped the answer",
        ),
        ({"response": [{"choices": [{"delta": {}}]}]}, "stream", "the response is a stream of chunks"),
        (
            {"request": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}},
            "not text",
            "`messages.content` has a part of the type `image_url`",
        ),
        ({"request": {"messages": [{"role": "user", "content": ""}]}}, "empty prompt", "the prompt is empty"),
    ],
)
def test_a_failed_request_is_skipped_and_reported_with_its_line(
    tmp_path: Path, changes: dict[str, Any], kind: str, message: str
) -> None:
    good = {"request": REQUEST, "response": RESPONSE}
    result, problems = records(tmp_path, good, {**good, **changes}, {**good, "note": 1})
    assert [record["line"] for record in result] == [1, 3]
    assert [(problem.line, problem.kind, problem.blocking) for problem in problems] == [(2, kind, False)]
    assert problems[0].message.startswith(message)
    assert Counter(problem.kind for problem in check_file(tmp_path / "log.jsonl"))[kind] == 1


def test_a_log_of_only_failures_and_a_file_that_is_no_log_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^log\.jsonl: none of the 2 records can be used"):
        records(tmp_path, {"request": REQUEST, "error": "down"}, {"request": REQUEST, "error": "down"})
    with pytest.raises(UserError, match=r"^log\.jsonl:1: the request holds neither `messages` nor `prompt`; join"):
        records(tmp_path, {"custom_id": "1", "response": {"status_code": 200, "body": RESPONSE}})
    with pytest.raises(UserError, match="say in `columns`"):
        records(tmp_path, {"request": "Where?", "response": "Here."})


def test_the_requests_of_a_batch_are_records_without_answers(tmp_path: Path) -> None:
    result, problems = records(tmp_path, {"custom_id": "1", "method": "POST", "url": "/v1", "body": REQUEST})
    assert (result[0]["completion"], problems) == (None, [])
    assert json.loads(result[0]["meta"])["model"] == "gpt-x"


@pytest.mark.parametrize(
    "row",
    [
        {"request": {**REQUEST, "system": "Be kind."}, "response": RESPONSE},
        {"request": {**REQUEST, "system": [{"type": "text", "text": "Be kind."}]}, "response": RESPONSE},
        {"request": REQUEST, "response": RESPONSE, "system": "Be kind."},
        {**REQUEST, "choices": RESPONSE["choices"], "system": "Be kind."},
    ],
)
def test_a_system_message_beside_the_turns_is_read(tmp_path: Path, row: dict[str, Any]) -> None:
    ((record,), _) = records(tmp_path, row)
    assert [(turn["role"], turn["content"]) for turn in record["prompt"]] == [
        ("system", "Be kind."),
        ("user", "Where?"),
    ]
    assert "system" not in json.loads(record["meta"])
