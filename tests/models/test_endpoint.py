"""An endpoint is queried with retries, a few requests at a time, and never twice for the same prompt."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from posttrain.models import endpoint as endpoint_module
from posttrain.models.endpoint import Endpoint, EndpointConfig, RateLimit
from posttrain.models.reply_cache import CachedGenerate, ReplyCache
from posttrain.store.errors import UserError, WorkError


def turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def open_endpoint(endpoint: Any, folder: Path, again: bool = True, **settings: Any) -> Endpoint:
    how = {name: settings.pop(name) for name in ("timeout", "retries", "concurrency") if name in settings}
    config = EndpointConfig(base_url=endpoint.url, model="m", **settings)
    opened = Endpoint(config, ReplyCache(folder), again=again)
    for name, value in how.items():
        setattr(opened, name, value)
    return opened


@pytest.mark.slow
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
    open_endpoint(endpoint, tmp_path)([turns("paid for")])
    generate = open_endpoint(endpoint, tmp_path, retries=1, timeout=0.2, concurrency=1)
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


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_single_prompt_that_is_refused_has_no_reply(endpoint: Any, tmp_path: Path, status: int) -> None:
    endpoint.faults = [status]
    generate = open_endpoint(endpoint, tmp_path, concurrency=1)
    assert generate([turns("too long"), turns("b"), turns("c")]) == [None, "echo b", "echo c"]
    assert generate.usage.requests == 2
    # It is asked again: the server's limits may be others then; meanwhile replies that are kept show that it works.
    endpoint.faults = [status]
    assert open_endpoint(endpoint, tmp_path)([turns("b"), turns("too long")]) == ["echo b", None]


def test_a_server_that_refuses_everything_is_not_asked_thousands_of_times(endpoint: Any, tmp_path: Path) -> None:
    endpoint.faults = [400] * 1000
    with pytest.raises(UserError, match="refused with 400"):
        open_endpoint(endpoint, tmp_path, concurrency=2)([turns(str(number)) for number in range(1000)])
    assert len(endpoint.faults) > 900


def test_an_unreachable_endpoint_raises(tmp_path: Path) -> None:
    endpoint = Endpoint(EndpointConfig(base_url="http://127.0.0.1:9/v1", model="m"), ReplyCache(tmp_path))
    endpoint.retries, endpoint.wait = 1, 0
    with pytest.raises(WorkError, match="ConnectError"):
        endpoint([turns("a")])


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
    generate_once = open_endpoint(endpoint, tmp_path, again=False)
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


PRICES = {"prices": (1e6, 1e6), "max_tokens": 10}


def test_the_budget_stops_before_it_is_exceeded_and_counts_earlier_replies(endpoint: Any, tmp_path: Path) -> None:
    # A reply costs 10; the most that a request may cost is 1 byte, 32 tokens around it and 10 of the reply: 43.
    generate = open_endpoint(endpoint, tmp_path, **PRICES, budget=62, concurrency=1)
    with pytest.raises(UserError, match=r"the budget of 62 could be exceeded: 20 is spent, .* may cost 43"):
        generate([turns(str(number)) for number in range(8)])
    assert len(endpoint.requests) == 2
    assert generate.spent == 20
    with pytest.raises(UserError, match="20 is spent"):
        open_endpoint(endpoint, tmp_path, **PRICES, budget=62)([turns("another")])
    known = open_endpoint(endpoint, tmp_path, **PRICES, budget=62)
    assert known([turns("0"), turns("1")]) == ["echo 0", "echo 1"]
    assert (known.usage.cost, len(endpoint.requests)) == (0.0, 2)
    more = open_endpoint(endpoint, tmp_path, **PRICES, budget=63)
    assert more([turns("2")]) == ["echo 2"]
    assert (more.usage.cost, more.spent) == (10.0, 30.0)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_open_requests_never_exceed_the_budget_together(endpoint: Any, tmp_path: Path, concurrency: int) -> None:
    # The server bills the most that is possible.
    endpoint.usage = {"prompt_tokens": 33, "completion_tokens": 10}
    endpoint.delay = 0.01
    generate = open_endpoint(endpoint, tmp_path, **PRICES, budget=200, concurrency=concurrency)
    with pytest.raises(UserError, match="could be exceeded"):
        generate([turns(str(number)) for number in range(10)])
    assert generate.spent <= 200
    assert len(endpoint.requests) == 4


def test_a_server_that_counts_no_tokens_costs_an_upper_bound(endpoint: Any, tmp_path: Path) -> None:
    endpoint.usage = None
    generate = open_endpoint(endpoint, tmp_path, **PRICES)
    generate([turns("a")])
    assert generate.spent == 1 + 2 * 16 + 10


def test_a_failed_request_frees_its_part_of_the_budget(endpoint: Any, tmp_path: Path) -> None:
    endpoint.faults = [500, 500]
    generate = open_endpoint(endpoint, tmp_path, **PRICES, budget=50, retries=0, concurrency=1)
    for text in ("a", "b"):
        with pytest.raises(WorkError):
            generate([turns(text)])
    assert generate([turns("c")]) == ["echo c"]


def test_a_budget_needs_a_price() -> None:
    with pytest.raises(UserError, match="a budget needs `prices`"):
        EndpointConfig.read({"base_url": "http://a", "model": "m", "budget": 1}, "posttrain.yaml")


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_no_minute_holds_more_requests_than_allowed() -> None:
    clock = Clock()
    limit = RateLimit(3, lambda: clock.now, clock.sleep)
    sent = []
    for _ in range(36):
        limit.wait()
        sent.append(clock.now)
        clock.now += 7.5
    for start in sent:
        assert len([moment for moment in sent if start <= moment < start + 60]) <= 3
    # Not slower than it must be.
    assert sent[3] == 60
    RateLimit(None, lambda: clock.now, pytest.fail).wait()


def test_the_endpoint_waits_for_its_rate_limit(endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("posttrain.models.endpoint.time", clock)
    clock.monotonic = lambda: clock.now  # type: ignore[attr-defined]
    generate = open_endpoint(endpoint, tmp_path, requests_per_minute=2, concurrency=1)
    generate._rate = RateLimit(2, lambda: clock.now, clock.sleep)
    endpoint.faults = [429]
    generate([turns("a"), turns("b")])
    # A request, its retry, and another one: the third has to wait.
    assert 60 <= clock.now < 61


def test_an_endpoint_that_says_when_is_asked_again_then(
    endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(endpoint_module.time, "sleep", waits.append)
    answers = [httpx.Response(429, headers={"Retry-After": "7"}), httpx.Response(503), httpx.Response(429)]
    answers[2].headers["Retry-After"] = "600"
    post = httpx.Client.post
    monkeypatch.setattr(httpx.Client, "post", lambda *args, **options: (answers or [post(*args, **options)]).pop(0))
    assert open_endpoint(endpoint, tmp_path)([turns("a")]) == ["echo a"]
    assert waits[0] == 7
    assert waits[1] < 7
    assert waits[2] == 60, "not for longer than a minute"
