"""An endpoint is queried with retries, a few requests at a time, and never twice for the same prompt."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.generation.endpoint import Endpoint, EndpointConfig
from posttrain.data.generation.reply_cache import CachedGenerate, ReplyCache
from posttrain.store.errors import UserError, WorkError


def turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def open_endpoint(endpoint: Any, folder: Path, anew: bool = True, **settings: Any) -> Endpoint:
    config = EndpointConfig(base_url=endpoint.url, model="m", **{"wait": 0.01, "timeout": 5, **settings})
    return Endpoint(config, ReplyCache(folder), anew=anew)


def test_replies_come_in_order_and_cost_is_counted(endpoint: Any, tmp_path: Path) -> None:
    generate = open_endpoint(endpoint, tmp_path)
    assert generate([turns(str(number)) for number in range(20)]) == [f"echo {number}" for number in range(20)]
    assert (generate.usage.requests, generate.usage.prompt_tokens, generate.usage.completion_tokens) == (20, 140, 60)
    assert endpoint.requests[0].keys() == {"model", "messages", "temperature", "max_tokens"}


def test_concurrency_limits_the_open_requests(endpoint: Any, tmp_path: Path) -> None:
    endpoint.delay = 0.02
    open_endpoint(endpoint, tmp_path, concurrency=3)([turns(str(number)) for number in range(12)])
    assert 1 < endpoint.most_at_once <= 3


@pytest.mark.parametrize("faults", [[429, 500], [503], ["garbage", "other json"], ["hang"]])
def test_transient_faults_are_retried(endpoint: Any, tmp_path: Path, faults: list[Any]) -> None:
    endpoint.faults = list(faults)
    assert open_endpoint(endpoint, tmp_path, timeout=0.3)([turns("a")]) == ["echo a"]
    assert endpoint.faults == []


@pytest.mark.parametrize(
    ("fault", "message"), [(500, "500"), ("hang", "no reply within 0.2 s"), ("garbage", "no chat completion: <html>")]
)
def test_a_permanent_fault_raises_and_earlier_replies_are_cached(
    endpoint: Any, tmp_path: Path, fault: Any, message: str
) -> None:
    generate = open_endpoint(endpoint, tmp_path, retries=1, timeout=0.2, concurrency=1)
    generate([turns("paid for")])
    endpoint.faults = [fault, fault]
    with pytest.raises(WorkError, match=f"failed 2 times, the last time with: {message}"):
        generate([turns("a"), turns("b")])
    retry = open_endpoint(endpoint, tmp_path)
    assert retry([turns("paid for"), turns("a")]) == ["echo paid for", "echo a"]
    assert retry.usage.reused == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refusal_raises_without_a_retry(endpoint: Any, tmp_path: Path, status: int) -> None:
    endpoint.faults = [status]
    with pytest.raises(UserError, match=f"refused with {status}: .*as the test") as error:
        open_endpoint(endpoint, tmp_path)([turns("a")])
    assert "\n" not in str(error.value)
    assert endpoint.requests == []


def test_an_unreachable_endpoint_raises(tmp_path: Path) -> None:
    config = EndpointConfig(base_url="http://127.0.0.1:9/v1", model="m", retries=1, wait=0)
    with pytest.raises(WorkError, match="ConnectError"):
        Endpoint(config, ReplyCache(tmp_path))([turns("a")])


def test_a_cut_or_empty_reply_is_none_and_cached(endpoint: Any, tmp_path: Path) -> None:
    endpoint.faults = ["cut", "empty"]
    generate = open_endpoint(endpoint, tmp_path, concurrency=1)
    assert generate([turns("a"), turns("b"), turns("c")]) == [None, None, "echo c"]
    assert open_endpoint(endpoint, tmp_path)([turns("a")]) == [None]
    assert len(endpoint.requests) == 3


def test_equal_prompts_get_separate_replies_unless_anew_is_false(endpoint: Any, tmp_path: Path) -> None:
    generate = open_endpoint(endpoint, tmp_path)
    generate([turns("a"), turns("a")])
    generate([turns("a")])
    assert len(endpoint.requests) == 3
    generate_once = open_endpoint(endpoint, tmp_path, anew=False)
    generate_once([turns("a")])
    generate_once([turns("a")])
    assert len(endpoint.requests) == 3


def test_raw_replies_are_cached_and_a_torn_one_is_not_used(endpoint: Any, tmp_path: Path) -> None:
    open_endpoint(endpoint, tmp_path)([turns("a"), turns("b")])
    [file] = tmp_path.glob("*.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["request"]["messages"][0]["content"] for line in entries} == {"a", "b"}
    assert all(line["response"]["usage"]["prompt_tokens"] == 7 for line in entries)
    file.write_bytes(file.read_bytes()[:-5])
    open_endpoint(endpoint, tmp_path)([turns("a"), turns("b")])
    assert len(endpoint.requests) == 3


def test_the_key_comes_from_the_environment_and_is_never_written(
    endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="the environment has no OUR_KEY"):
        open_endpoint(endpoint, tmp_path, key_variable="OUR_KEY")
    monkeypatch.setenv("OUR_KEY", "geheim")
    open_endpoint(endpoint, tmp_path, key_variable="OUR_KEY")([turns("a")])
    assert endpoint.headers[-1]["Authorization"] == "Bearer geheim"
    contents = [file.read_bytes() for file in tmp_path.iterdir()]
    assert contents
    assert all(b"geheim" not in data for data in contents)


def test_a_missing_httpx_raises(endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UserError, match=r"pip install 'posttrain\[synthesis\]'"):
        open_endpoint(endpoint, tmp_path)


def test_a_local_model_is_queried_only_for_new_prompts(tmp_path: Path) -> None:
    queries: list[str] = []

    def generate(prompts: Any) -> list[str]:
        queries.extend(prompt[-1]["content"] for prompt in prompts)
        return [prompt[-1]["content"].upper() for prompt in prompts]

    assert CachedGenerate(generate, "m", ReplyCache(tmp_path))([turns("a"), turns("b")]) == ["A", "B"]
    assert CachedGenerate(generate, "m", ReplyCache(tmp_path))([turns("c"), turns("a")]) == ["C", "A"]
    assert queries == ["a", "b", "c"]
    CachedGenerate(generate, "another", ReplyCache(tmp_path))([turns("a")])
    assert queries == ["a", "b", "c", "a"]
    with pytest.raises(WorkError, match="0 replies to 1 prompts"):
        CachedGenerate(lambda prompts: [], "m", ReplyCache(tmp_path))([turns("z")])
