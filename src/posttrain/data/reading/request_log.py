"""Parses logs of OpenAI-style requests: messages, answers and settings.

The shapes are those of OpenAI's API reference: chat completions and completions, alone or inside the batch API's
``body`` and ``response.body``. Every log has failed requests; they are skipped and counted.
"""

from collections.abc import Mapping
from typing import Any

from posttrain.data.reading.messages import (
    Content,
    InvalidRecord,
    add_context,
    check_prompt,
    parse_prompt,
    parse_text,
    parse_turns,
    preview,
    split_conversation,
)
from posttrain.data.reading.rows import parse_json
from posttrain.data.records.record import Turn

LOG_COLUMNS = ("request", "body", "messages", "system", "response", "choices", "error")
"""The columns that are parsed; all others are kept in ``meta``."""

_RESPONSE_FIELDS = ("id", "created", "model", "usage", "system_fingerprint", "service_tier")


def parse_request_log(values: Mapping[str, Any]) -> Content:
    """Parses one request and its answer; ``meta`` gets the request's settings, and the response's id, model and usage.

    A column of the row wins over a setting of the same name; the response's id is then ``response_id``. The requested
    model is ``requested_model`` where the response names another.

    Raises:
        InvalidRecord: it is not a log; or of the kind "failed request", "tool calls" or "not text", which do not block.
    """
    request = _request(values)
    response = _response(values)
    choice = _choice(values, response) if response is not None else None
    try:
        turns = _prompt(values, request)
        if choice is None and turns[-1]["role"] == "assistant":
            content = split_conversation(turns, {})
            return Content(content.prompt, content.completion, extra=_request_metadata(values, request, {}, {}))
        prompt = check_prompt(turns)
        answer = _answer(choice) if choice is not None else None
    except InvalidRecord as bad:
        # These mean that the file is not a log at all; the others happen in every log.
        if bad.kind in ("not turns", "wrong role"):
            raise
        raise InvalidRecord(bad.kind, bad.message, bad.fix, blocking=False) from None
    return Content(prompt, answer, extra=_request_metadata(values, request, response or {}, choice or {}))


def _object(value: Any) -> Any:
    """Parses a value that is the JSON text of an object; returns others unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return parse_json(value)
    return value


def _request(values: Mapping[str, Any]) -> Mapping[str, Any]:
    request = _object(values.get("request", values.get("body", values)))
    if isinstance(request, Mapping) and "messages" not in request and "prompt" not in request:
        request = _object(request.get("body"))
    if not isinstance(request, Mapping) or not ("messages" in request or "prompt" in request):
        fix = "join answers with their requests first, or say in `columns` which column holds what"
        raise InvalidRecord("not a request", "the request holds neither `messages` nor `prompt`", fix)
    return request


def _response(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the object with the choices; None for a row without a response, as in a batch that was not sent yet."""
    error = _object(values.get("error"))
    if error:
        raise _failed(f"the request failed: {_error_message(error)}")
    if "choices" in values:
        return {name: values[name] for name in ("choices", *_RESPONSE_FIELDS) if name in values}
    if "response" not in values:
        return None
    response = _object(values["response"])
    if isinstance(response, list) and response and all(isinstance(chunk, Mapping) for chunk in response):
        raise InvalidRecord("stream", "the response is a stream of chunks", "log the whole response", blocking=False)
    if not isinstance(response, Mapping):
        raise _failed(f"there is no response but {preview(response)}")
    status = response.get("status_code")
    if isinstance(status, int) and not 200 <= status < 300:
        raise _failed(f"the request failed with the status {status}")
    body = _object(response.get("body"))
    response = body if isinstance(body, Mapping) else response
    if response.get("error"):
        raise _failed(f"the request failed: {_error_message(response['error'])}")
    return response


def _choice(values: Mapping[str, Any], response: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = response.get("choices")
    if isinstance(choices, str):
        choices = parse_json(choices)
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise _failed("the response holds no choices")
    # A filtered answer is cut off somewhere, and nothing to learn from.
    if choices[0].get("finish_reason") == "content_filter":
        raise _failed("a content filter stopped the answer")
    return choices[0]


def _prompt(values: Mapping[str, Any], request: Mapping[str, Any]) -> list[Turn]:
    messages = request.get("messages")
    if isinstance(messages, str):
        messages = parse_json(messages)
    turns = parse_turns(messages, "messages")[0] if "messages" in request else parse_prompt(request["prompt"])
    # Anthropic's requests hold the system message beside the turns.
    return add_context(turns, request.get("system", values.get("system")))


def _answer(choice: Mapping[str, Any]) -> str:
    message = choice.get("message", choice)
    if not isinstance(message, Mapping):
        raise _failed("the response holds no message")
    if message.get("tool_calls") or message.get("function_call"):
        raise InvalidRecord("tool calls", "the answer calls tools, which records cannot hold")
    value = message.get("content") if "message" in choice else choice.get("text")
    if value is None:
        raise _failed("the model refused" if message.get("refusal") else "the answer is empty")
    text = parse_text(value, "content")
    if not text.strip():
        raise _failed("the answer is empty")
    return text


def _request_metadata(
    values: Mapping[str, Any], request: Mapping[str, Any], response: Mapping[str, Any], choice: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of request and response besides the texts, without those that the row has itself."""
    nested = request is not values
    settings = request if nested else {}
    metadata = {name: value for name, value in settings.items() if name not in ("messages", "prompt", "system")}
    answered = {name: response[name] for name in _RESPONSE_FIELDS if response.get(name) is not None}
    # A provider resolves a name such as `gpt-4o` to a dated model.
    if metadata.get("model") not in (None, answered.get("model", metadata.get("model"))):
        metadata["requested_model"] = metadata["model"]
    metadata.update(answered)
    if choice.get("finish_reason") is not None:
        metadata["finish_reason"] = choice["finish_reason"]
    if "id" in values and answered.get("id") not in (None, values["id"]):
        metadata["response_id"] = answered["id"]
    return {name: value for name, value in metadata.items() if name not in values or name in LOG_COLUMNS}


def _failed(message: str) -> InvalidRecord:
    return InvalidRecord("failed request", message, blocking=False)


def _error_message(error: Any) -> str:
    message = error.get("message") or error.get("code") if isinstance(error, Mapping) else error
    return preview(message if message is not None else error)
