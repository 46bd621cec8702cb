"""Queries a model behind OpenAI's chat completions API: retries with backoff, and never pays twice for one request."""

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from posttrain.data.generation.reply_cache import ReplyCache, Turns, request_keys
from posttrain.store.errors import UserError, WorkError
from posttrain.store.section import Section

log = logging.getLogger("posttrain")

_TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)

_MAX_WAIT = 60.0  # seconds


class EndpointConfig(Section):
    """Configures a server with OpenAI's chat completions API: OpenAI, vLLM, llama.cpp, Ollama and others."""

    base_url: str = Field(description="Base of `/chat/completions`, such as http://127.0.0.1:8000/v1.")
    model: str = Field(min_length=1, description="The model's name there.")
    key_variable: str | None = Field(None, description="The environment variable that holds the key; empty for none.")
    temperature: float = Field(0.7, ge=0, description="Sampling temperature.")
    max_tokens: int = Field(1024, ge=1, description="Longest reply, in tokens; a longer one is not used.")
    timeout: float = Field(120.0, gt=0, description="Seconds to wait for a reply.")
    retries: int = Field(5, ge=0, description="Retries of a request that failed temporarily.")
    wait: float = Field(1.0, ge=0, description="Seconds before the first retry; each further one waits twice as long.")
    concurrency: int = Field(8, ge=1, description="Requests under way at a time.")

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url.rstrip("/")


@dataclass
class Usage:
    """Counts replies and tokens as the server bills them, and replies reused from the cache."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused: int = 0


class Endpoint:
    """Implements `posttrain.data.generation.reply_cache.Generate` over HTTP; ``usage`` counts the cost.

    A reply that was cut off at ``max_tokens``, or holds no text, is None.

    Args:
        replies: cache of every reply.
        anew: whether a prompt of an earlier call gets a new reply.

    Raises:
        UserError: httpx is not installed, the key's variable is not set, or (when called) the server refuses.
        WorkError: when called: a request failed each time; replies so far are kept.
    """

    def __init__(self, config: EndpointConfig, replies: ReplyCache, *, anew: bool = True) -> None:
        try:
            import httpx  # noqa: F401
        except ImportError:
            fix = "pip install 'posttrain[synthesis]'"
            raise UserError("httpx is not installed", where="endpoint", fix=fix) from None
        self._config, self._replies = config, replies
        self._headers = {}
        if config.key_variable is not None:
            key = os.environ.get(config.key_variable)
            if not key:
                what = f"the environment has no {config.key_variable}"
                raise UserError(what, where="endpoint.key_variable", fix="set it to the key")
            self._headers["Authorization"] = f"Bearer {key}"
        self._earlier: Counter[str] = Counter()
        self._anew = anew
        self.usage = Usage()

    def __call__(self, prompts: Sequence[Turns]) -> list[str | None]:
        import httpx

        config = self._config
        bodies = [
            {
                "model": config.model,
                "messages": [{"role": turn["role"], "content": turn["content"]} for turn in prompt],
                "temperature": config.temperature,
                "max_tokens": config.max_tokens,
            }
            for prompt in prompts
        ]
        # Numbering starts over, so the same prompt finds its earlier reply.
        if not self._anew:
            self._earlier.clear()
        names = request_keys([{"url": config.base_url, "body": body} for body in bodies], self._earlier)
        # Only what is not cached is paid for.
        new = [at for at, name in enumerate(names) if self._replies.get(name) is None]
        self.usage.reused += len(names) - len(new)
        if new:
            limits = httpx.Limits(max_connections=config.concurrency)
            with (
                httpx.Client(timeout=config.timeout, headers=self._headers, limits=limits) as client,
                ThreadPoolExecutor(config.concurrency) as pool,
            ):
                futures = [pool.submit(self._ask, client, names[at], bodies[at]) for at in new]
                try:
                    # Results are read in order, so usage and errors do not depend on which reply comes first.
                    for future in futures:
                        self._count(future.result())
                finally:
                    pool.shutdown(cancel_futures=True)
        return [_text(reply["response"]) if (reply := self._replies.get(name)) else None for name in names]

    def _ask(self, client: Any, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Requests and caches a reply; retries while the failure may be temporary."""
        import httpx

        url = f"{self._config.base_url}/chat/completions"
        # Jitter by key: parallel requests do not retry at once, and a rerun waits the same.
        spread = random.Random(key)
        for attempt in range(self._config.retries + 1):
            retry_after = 0.0
            try:
                answer = client.post(url, json=body)
            except httpx.TimeoutException:
                problem = f"no reply within {self._config.timeout:g} s"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200 and (response := _completion(answer)) is not None:
                    self._replies.put(key, {"request": body, "response": response})
                    return response
                reply_text = " ".join(answer.text[:200].split())
                if answer.status_code != 200 and answer.status_code not in _TRANSIENT:
                    fix = "check address, model and key"
                    raise UserError(f"the endpoint refused with {answer.status_code}: {reply_text}", where=url, fix=fix)
                problem = (
                    f"{answer.status_code} {reply_text}"
                    if answer.status_code != 200
                    else f"no chat completion: {reply_text}"
                )
                retry_after = _retry_after(answer.headers.get("retry-after"))
            if attempt < self._config.retries:
                log.debug("%s: %s; trying again", url, problem)
                wait = self._config.wait * 2**attempt * spread.uniform(0.5, 1.0)
                time.sleep(min(_MAX_WAIT, max(wait, retry_after)))
        tries = self._config.retries + 1
        raise WorkError(f"{url}: failed {tries} times, the last time with: {problem}; the replies so far are kept")

    def _count(self, response: dict[str, Any]) -> None:
        # Not every server counts tokens.
        usage = response.get("usage")
        self.usage.requests += 1
        for name in ("prompt_tokens", "completion_tokens"):
            number = usage.get(name) if isinstance(usage, dict) else None
            setattr(self.usage, name, getattr(self.usage, name) + (number if isinstance(number, int) else 0))


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
