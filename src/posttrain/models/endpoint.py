"""Queries a model behind OpenAI's chat completions API: retries, limits of rate and cost, and no request paid twice."""

import logging
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from posttrain.models.reply_cache import ReplyCache, Turns, request_keys
from posttrain.store.errors import UserError, WorkError
from posttrain.store.section import Section

log = logging.getLogger("posttrain")

_TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)

# Statuses of one prompt that is too long or against the server's rules; or of a wrong setting, which concerns all.
_REFUSALS = (400, 413, 422)

_LONE_REFUSALS = 20  # first prompts refused, after which it is a wrong setting

_MAX_WAIT = 60.0  # seconds

_WINDOW = 60.0  # seconds, over which requests are counted

_MESSAGE_TOKENS = 16  # at most so many tokens mark the begin, role and end of a message


class EndpointConfig(Section):
    """Configures a server with OpenAI's chat completions API: OpenAI, vLLM, llama.cpp, Ollama and others."""

    base_url: str = Field(description="Base of `/chat/completions`, such as http://127.0.0.1:8000/v1.")
    model: str = Field(min_length=1, description="The model's name there.")
    key_variable: str | None = Field(None, description="The environment variable that holds the key; empty for none.")
    max_tokens: int = Field(1024, ge=1, description="Longest reply, in tokens; a longer one is not used.")
    requests_per_minute: int | None = Field(None, ge=1, description="Requests in a minute at most; null: any number.")
    prices: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = Field(
        (0.0, 0.0), description="Prices of a million tokens of prompts and of replies, in any currency."
    )
    budget: float | None = Field(
        None,
        gt=0,
        description="Stops before a request could make all replies of this model that are kept in one folder dearer "
        "than this; null: no limit.",
    )

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _a_budget_has_a_price(self) -> Self:
        if self.budget is not None and not any(self.prices):
            raise ValueError("a budget needs `prices`")
        return self

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Returns the price of so many tokens."""
        return (prompt_tokens * self.prices[0] + completion_tokens * self.prices[1]) / 1e6


@dataclass
class Usage:
    """Counts replies, tokens and their price as the server bills them, and replies reused from the cache."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused: int = 0
    cost: float = 0.0


class RefusedPromptError(UserError):
    """The server refused one request, and may answer others."""


class Endpoint:
    """Implements `posttrain.models.reply_cache.Generate` over HTTP; ``usage`` counts the cost.

    A reply that was cut off at ``max_tokens``, or holds no text, is None; so is that to a prompt which the server
    refuses, where it answers others.

    Args:
        config: the server.
        replies: cache of every reply.
        temperature: sampling temperature; 0 for greedy decoding.
        again: whether a prompt of an earlier call gets a new reply.

    Attributes:
        timeout: seconds to wait for a reply.
        retries: retries of a request that failed temporarily.
        wait: seconds before the first retry; each further one waits twice as long.
        concurrency: requests under way at a time.

    Raises:
        UserError: the key's variable is not set, or (when called) the server refuses.
        WorkError: when called: a request failed each time; replies so far are kept.
    """

    timeout: float = 120.0
    retries: int = 5
    wait: float = 1.0
    concurrency: int = 8

    def __init__(
        self, config: EndpointConfig, replies: ReplyCache, *, temperature: float = 0.7, again: bool = True
    ) -> None:
        self._config, self._replies, self._temperature = config, replies, temperature
        self._headers = {}
        if config.key_variable is not None:
            key = os.environ.get(config.key_variable)
            if not key:
                what = f"the environment has no {config.key_variable}"
                raise UserError(what, where="endpoint.key_variable", fix="set it to the key")
            self._headers["Authorization"] = f"Bearer {key}"
        self._earlier: Counter[str] = Counter()
        self._again = again
        self.usage = Usage()
        self._rate = RateLimit(config.requests_per_minute)
        # Replies of earlier processes count too: the budget is for the work, however often it is resumed.
        earlier = [value for value in replies.values() if value.get("request", {}).get("model") == config.model]
        self._budget = _Budget(config, sum(_cost(config, value["request"], value["response"]) for value in earlier))

    @property
    def spent(self) -> float:
        """The price of all replies of this model in the cache."""
        return self._budget.spent

    def __call__(self, prompts: Sequence[Turns]) -> list[str | None]:
        import httpx

        config = self._config
        bodies = [
            {
                "model": config.model,
                "messages": [{"role": turn["role"], "content": turn["content"]} for turn in prompt],
                "temperature": self._temperature,
                "max_tokens": config.max_tokens,
            }
            for prompt in prompts
        ]
        # Numbering starts over, so the same prompt finds its earlier reply.
        if not self._again:
            self._earlier.clear()
        names = request_keys([{"url": config.base_url, "body": body} for body in bodies], self._earlier)
        # Only what is not cached is paid for.
        new = [at for at, name in enumerate(names) if self._replies.get(name) is None]
        self.usage.reused += len(names) - len(new)
        if new:
            limits = httpx.Limits(max_connections=self.concurrency)
            with (
                httpx.Client(timeout=self.timeout, headers=self._headers, limits=limits) as client,
                ThreadPoolExecutor(self.concurrency) as pool,
            ):
                futures = [pool.submit(self._ask, client, names[at], bodies[at]) for at in new]
                try:
                    self._count_all(futures, others=len(names) - len(new))
                finally:
                    pool.shutdown(cancel_futures=True)
        return [_text(reply["response"]) if (reply := self._replies.get(name)) else None for name in names]

    def _ask(self, client: Any, key: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Requests and caches a reply, within the budget; returns it with its price."""
        most = self._budget.reserve(body)
        price = 0.0
        try:
            response = self._request(client, key, body)
            price = _cost(self._config, body, response)
        finally:
            # A request that failed is taken for free: no server says what it bills for one.
            self._budget.settle(most, price)
        return response, price

    def _request(self, client: Any, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Requests and caches a reply; retries while the failure may be temporary."""
        import httpx

        url = f"{self._config.base_url}/chat/completions"
        # Jitter by key: parallel requests do not retry at once, and a rerun waits the same.
        spread = random.Random(key)
        for attempt in range(self.retries + 1):
            retry_after = 0.0
            # Retries too: the server counts each of them.
            self._rate.wait()
            try:
                answer = client.post(url, json=body)
            except httpx.TimeoutException:
                problem = f"no reply within {self.timeout:g} s"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200 and (response := _completion(answer)) is not None:
                    self._replies.put(key, {"request": body, "response": response})
                    return response
                reply_text = " ".join(answer.text[:200].split())
                if answer.status_code != 200 and answer.status_code not in _TRANSIENT:
                    fix = "check address, model and key"
                    kind = RefusedPromptError if answer.status_code in _REFUSALS else UserError
                    raise kind(f"the endpoint refused with {answer.status_code}: {reply_text}", where=url, fix=fix)
                problem = (
                    f"{answer.status_code} {reply_text}"
                    if answer.status_code != 200
                    else f"no chat completion: {reply_text}"
                )
                retry_after = _retry_after(answer.headers.get("retry-after"))
            if attempt < self.retries:
                log.debug("%s: %s; trying again", url, problem)
                wait = self.wait * 2**attempt * spread.uniform(0.5, 1.0)
                time.sleep(min(_MAX_WAIT, max(wait, retry_after)))
        raise WorkError(
            f"{url}: failed {self.retries + 1} times, the last time with: {problem}; the replies so far are kept"
        )

    def _count_all(self, futures: Sequence[Future[tuple[dict[str, Any], float]]], others: int) -> None:
        """Counts the replies; raises the first refusal if no prompt is answered, of this call's ``others`` neither."""
        refused: list[RefusedPromptError] = []
        # In order, so that usage and errors do not depend on which reply comes first.
        for future in futures:
            try:
                self._count(*future.result())
            except RefusedPromptError as error:
                refused.append(error)
                if not others and len(refused) >= _LONE_REFUSALS:
                    break
            else:
                others += 1
        if refused and not others:
            raise refused[0]
        if refused:
            log.warning("%d prompts were refused and have no reply; the first: %s", len(refused), refused[0])

    def _count(self, response: dict[str, Any], price: float) -> None:
        self.usage.requests += 1
        self.usage.cost += price
        for name in ("prompt_tokens", "completion_tokens"):
            setattr(self.usage, name, getattr(self.usage, name) + (_billed(response, name) or 0))


class RateLimit:
    """Delays requests so that no window of a minute holds more of them than allowed.

    Args:
        requests: the most in a minute; None for any number.
        clock: seconds that only grow.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        requests: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._requests, self._clock, self._sleep = requests, clock, sleep
        self._window: deque[float] = deque()  # moment of each request
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits until a request may be sent."""
        while self._requests is not None:
            with self._lock:
                now = self._clock()
                while self._window and self._window[0] <= now - _WINDOW:
                    self._window.popleft()
                if len(self._window) < self._requests:
                    self._window.append(now)
                    return
                pause = self._window[0] + _WINDOW - now
            self._sleep(pause)


class _Budget:
    """Reserves the most that a request may cost before it is sent, so that open ones cannot exceed the budget together.

    Args:
        spent: price of earlier replies.
    """

    def __init__(self, config: EndpointConfig, spent: float) -> None:
        self._config, self.spent = config, spent
        self._reserved, self._open = 0.0, 0
        self._settled = threading.Condition()

    def reserve(self, body: dict[str, Any]) -> float:
        """Returns the most that the request may cost, and keeps it free until `settle`.

        Raises:
            UserError: the rest of the budget is smaller.
        """
        # A token is a byte at least: the bound holds for every tokenizer.
        prompt_tokens = _prompt_bytes(body) + _MESSAGE_TOKENS * (len(body["messages"]) + 1)
        most = self._config.cost(prompt_tokens, body["max_tokens"])
        budget = self._config.budget
        with self._settled:
            # Open requests will cost less than is reserved for them, and may leave enough.
            while budget is not None and self.spent + self._reserved + most > budget:
                if not self._open:
                    what = f"the budget of {budget:g} could be exceeded: {self.spent:.6g} is spent"
                    fix = "raise it; the replies so far are kept"
                    raise UserError(
                        f"{what}, and the next request may cost {most:.6g}", where="endpoint.budget", fix=fix
                    )
                self._settled.wait()
            self._reserved += most
            self._open += 1
        return most

    def settle(self, most: float, price: float) -> None:
        """Replaces what was reserved for a request by its price."""
        with self._settled:
            self._open -= 1
            # Exactly 0 without open requests: rounding must not add up over thousands of them.
            self._reserved = self._reserved - most if self._open else 0.0
            self.spent += price
            self._settled.notify_all()


def _prompt_bytes(body: dict[str, Any]) -> int:
    return sum(len(message["content"].encode()) for message in body["messages"])


def _billed(response: dict[str, Any], name: str) -> int | None:
    """Returns a count of tokens as the server gives it; None where it counts none."""
    usage = response.get("usage")
    number = usage.get(name) if isinstance(usage, dict) else None
    return number if isinstance(number, int) else None


def _tokens(body: dict[str, Any], response: dict[str, Any]) -> tuple[int, int]:
    """Returns the tokens of prompt and reply; an upper bound where the server does not count them."""
    prompt, completion = (_billed(response, name) for name in ("prompt_tokens", "completion_tokens"))
    if prompt is None:
        prompt = _prompt_bytes(body) + _MESSAGE_TOKENS * (len(body["messages"]) + 1)
    return prompt, body["max_tokens"] if completion is None else completion


def _cost(config: EndpointConfig, body: dict[str, Any], response: dict[str, Any]) -> float:
    return config.cost(*_tokens(body, response))


def _completion(answer: Any) -> dict[str, Any] | None:
    """The body if it is a chat completion, whatever its text."""
    try:
        response = answer.json()
        message = response["choices"][0]["message"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return dict(response) if isinstance(message, dict) else None


def _text(response: dict[str, Any]) -> str | None:
    choice = response["choices"][0]
    text = choice["message"].get("content")
    # A truncated reply ends in the middle of an item.
    if choice.get("finish_reason") == "length" or not isinstance(text, str) or not text.strip():
        return None
    return text


def _retry_after(header: str | None) -> float:
    """Seconds of ``Retry-After``; ignores dates."""
    return float(header) if header is not None and header.isdigit() else 0.0
