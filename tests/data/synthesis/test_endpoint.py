"""An endpoint is asked with patience, a few at a time, and never twice for the same."""

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


def opened(endpoint: Any, folder: Path, anew: bool = True, **settings: Any) -> Endpoint:
    config = EndpointConfig(base_url=endpoint.url, model="m", **{"wait": 0.01, "timeout": 5, **settings})
    return Endpoint(config, ReplyCache(folder), anew=anew)


def test_replies_come_in_order_and_cost_is_counted(endpoint: Any, tmp_path: Path) -> None:
    ask = opened(endpoint, tmp_path)
    assert ask([turns(str(number)) for number in range(20)]) == [f"echo {number}" for number in range(20)]
    assert (ask.usage.requests, ask.usage.prompt_tokens, ask.usage.completion_tokens) == (20, 140, 60)
    assert endpoint.asked[0].keys() == {"model", "messages", "temperature", "max_tokens"}


def test_at_most_so_many_at_once(endpoint: Any, tmp_path: Path) -> None:
    endpoint.delay = 0.02
    opened(endpoint, tmp_path, concurrency=3)([turns(str(number)) for number in range(12)])
    assert 1 < endpoint.most_at_once <= 3


@pytest.mark.parametrize("faults", [[429, 500], [503], ["garbage", "other json"], ["hang"]])
def test_what_may_pass_is_tried_again(endpoint: Any, tmp_path: Path, faults: list[Any]) -> None:
    endpoint.faults = list(faults)
    assert opened(endpoint, tmp_path, timeout=0.3)([turns("a")]) == ["echo a"]
    assert endpoint.faults == []


@pytest.mark.parametrize(
    ("fault", "says"), [(500, "500"), ("hang", "no reply within 0.2 s"), ("garbage", "no chat completion: <html>")]
)
def test_what_never_passes_is_said_and_the_rest_is_kept(endpoint: Any, tmp_path: Path, fault: Any, says: str) -> None:
    ask = opened(endpoint, tmp_path, retries=1, timeout=0.2, concurrency=1)
    ask([turns("paid for")])
    endpoint.faults = [fault, fault]
    with pytest.raises(WorkError, match=f"failed 2 times, the last time with: {says}"):
        ask([turns("a"), turns("b")])
    again = opened(endpoint, tmp_path)
    assert again([turns("paid for"), turns("a")]) == ["echo paid for", "echo a"]
    assert again.usage.reused == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refusal_ends_it_at_once(endpoint: Any, tmp_path: Path, status: int) -> None:
    endpoint.faults = [status]
    with pytest.raises(UserError, match=f"refused with {status}: .*as the test") as result:
        opened(endpoint, tmp_path)([turns("a")])
    assert "\n" not in str(result.value)
    assert endpoint.asked == []


def test_nobody_listens(tmp_path: Path) -> None:
    config = EndpointConfig(base_url="http://127.0.0.1:9/v1", model="m", retries=1, wait=0)
    with pytest.raises(WorkError, match="ConnectError"):
        Endpoint(config, ReplyCache(tmp_path))([turns("a")])


def test_a_cut_or_empty_reply_is_none_and_kept(endpoint: Any, tmp_path: Path) -> None:
    endpoint.faults = ["cut", "empty"]
    ask = opened(endpoint, tmp_path, concurrency=1)
    assert ask([turns("a"), turns("b"), turns("c")]) == [None, None, "echo c"]
    assert opened(endpoint, tmp_path)([turns("a")]) == [None]
    assert len(endpoint.asked) == 3


def test_equal_prompts_get_replies_of_their_own_unless_told_not_to(endpoint: Any, tmp_path: Path) -> None:
    ask = opened(endpoint, tmp_path)
    ask([turns("a"), turns("a")])
    ask([turns("a")])
    assert len(endpoint.asked) == 3
    same = opened(endpoint, tmp_path, anew=False)
    same([turns("a")])
    same([turns("a")])
    assert len(endpoint.asked) == 3


def test_every_raw_reply_is_kept_and_a_torn_one_is_not_used(endpoint: Any, tmp_path: Path) -> None:
    opened(endpoint, tmp_path)([turns("a"), turns("b")])
    [file] = tmp_path.glob("*.jsonl")
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["request"]["messages"][0]["content"] for line in kept} == {"a", "b"}
    assert all(line["response"]["usage"]["prompt_tokens"] == 7 for line in kept)
    file.write_bytes(file.read_bytes()[:-5])
    opened(endpoint, tmp_path)([turns("a"), turns("b")])
    assert len(endpoint.asked) == 3


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
    endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="the environment has no OUR_KEY"):
        opened(endpoint, tmp_path, key_variable="OUR_KEY")
    monkeypatch.setenv("OUR_KEY", "geheim")
    opened(endpoint, tmp_path, key_variable="OUR_KEY")([turns("a")])
    assert endpoint.headers[-1]["Authorization"] == "Bearer geheim"
    written = [file.read_bytes() for file in tmp_path.iterdir()]
    assert written
    assert all(b"geheim" not in content for content in written)


def test_without_httpx(endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UserError, match=r"pip install 'posttrain\[synthesis\]'"):
        opened(endpoint, tmp_path)


def test_a_model_at_hand_is_asked_only_for_what_is_new(tmp_path: Path) -> None:
    asked: list[str] = []

    def generate(prompts: Any) -> list[str]:
        asked.extend(prompt[-1]["content"] for prompt in prompts)
        return [prompt[-1]["content"].upper() for prompt in prompts]

    assert CachedGenerate(generate, "m", ReplyCache(tmp_path))([turns("a"), turns("b")]) == ["A", "B"]
    assert CachedGenerate(generate, "m", ReplyCache(tmp_path))([turns("c"), turns("a")]) == ["C", "A"]
    assert asked == ["a", "b", "c"]
    CachedGenerate(generate, "another", ReplyCache(tmp_path))([turns("a")])
    assert asked == ["a", "b", "c", "a"]
    with pytest.raises(WorkError, match="0 replies to 1 prompts"):
        CachedGenerate(lambda prompts: [], "m", ReplyCache(tmp_path))([turns("z")])
