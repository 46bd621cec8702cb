"""A client of the labelling API, for programs that label or watch from elsewhere.

with LabelClient("https://label.example.com", token) as client:
    while task := client.next_item():
        client.answer(task.item, my_model(task.content, task.labels))
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from types import TracebackType
from typing import Any

import httpx

from posttrain.label.queue_rows import PausedError, Task
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.errors import UserError, WorkError

_BUSY = (429, 502, 503, 504)
_LONGEST_WAIT = 30.0


class LabelClient(AbstractContextManager["LabelClient"]):
    """Labels over HTTP as the account of a token. Close it, or use it in a ``with`` block.

    Lost connections and busy servers are tried again: an answer that is sent twice is stored once.

    Args:
        url: Address of the server, such as ``http://127.0.0.1:8600``.
        token: An API token of an account: ``posttrain accounts token NAME``.
        timeout: Seconds to wait for a reply.
        retries: Attempts after the first one.
        transport: How requests are sent; None: over the network.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: float = 30.0,
        retries: int = 4,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.retries = retries
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._http = httpx.Client(
            base_url=f"{url.rstrip('/')}/api", headers=headers, timeout=timeout, transport=transport
        )

    def next_item(self, batch: str | None = None) -> Task | None:
        """Leases the account the next item; None: there is none at the moment.

        Raises:
            PausedError: the account is paused; the message says why.
        """
        return _task(self._call("POST", "/items/next", {"batch": batch}))

    def answer(
        self,
        item: int,
        answer: Any,
        *,
        note: str | None = None,
        seconds: float | None = None,
    ) -> int:
        """Stores an answer; returns its id once it is on the server's disk.

        Args:
            item: Id of the item.
            answer: The answer, as the item's kind takes it.
            note: A remark.
            seconds: Time from showing the item to the answer; None: since it was leased.

        Raises:
            Conflict: the item was decided, given to others, or answered differently by the account.
            UserError: the answer does not fit the item.
        """
        body = {"answer": answer, "note": note, "seconds": seconds}
        return int(self._call("POST", f"/items/{item}/answer", body)["answer_id"])

    def skip(self, item: int, reason: str | None = None) -> None:
        """Leaves an item to others."""
        self._call("POST", f"/items/{item}/skip", {"reason": reason})

    def flag(self, item: int, note: str, answer: Any = None) -> None:
        """Sends an item to review, with a note that says what is wrong with it."""
        self._call("POST", f"/items/{item}/flag", {"note": note, "answer": answer})

    def undo(self, item: int | None = None) -> Task | None:
        """Takes the account's last answer back, and leases the item again.

        Args:
            item: The item that it is expected to be of.
        """
        return _task(self._call("POST", "/undo", {"item": item}))

    def batches(self) -> list[dict[str, Any]]:
        """Returns all batches with their progress, oldest first."""
        return list(self._call("GET", "/batches"))

    def progress(self, batch: str) -> dict[str, Any]:
        """Returns the progress of a batch.

        Raises:
            NotFound: there is no such batch.
        """
        for state in self._call("GET", "/batches", params={"name": batch}):
            return dict(state)
        raise NotFound(f"there is no batch `{batch}`")

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, path: str, body: Any = None, params: Mapping[str, str] | None = None) -> Any:
        for attempt in range(self.retries + 1):
            pause = min(0.25 * 2**attempt, _LONGEST_WAIT)
            try:
                response = self._http.request(method, path, json=body, params=params)
            except httpx.HTTPError as error:
                problem: str = f"{type(error).__name__}: {error}"
            else:
                if response.status_code not in _BUSY:
                    return _content(response)
                problem = _line(response)
                asked = response.headers.get("retry-after", "")
                pause = min(float(asked), _LONGEST_WAIT) if asked.isdigit() else pause
            if attempt < self.retries:
                time.sleep(pause)
        raise WorkError(f"{self._http.base_url}: no answer after {self.retries + 1} attempts ({problem})")


def _content(response: httpx.Response) -> Any:
    if response.is_success:
        return response.json()
    if response.status_code >= 500:
        raise WorkError(f"{response.url}: {_line(response)}")
    kind = {404: NotFound, 409: Conflict}.get(response.status_code, UserError)
    raise kind(_line(response))


def _line(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {response.status_code}"


def _task(reply: Mapping[str, Any]) -> Task | None:
    if reply.get("paused"):
        raise PausedError(reply["paused"])
    task = reply["task"]
    if task is None:
        return None
    ends_at = None if task["ends_at"] is None else datetime.fromisoformat(task["ends_at"])
    return Task(**{**task, "ends_at": ends_at})
