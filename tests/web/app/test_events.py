"""The stream of events: what it tells, to whom, and how much of it there may be."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import WorkError
from posttrain.web.api import loop as events_module
from posttrain.web.api.loop import MAX_STREAMS, MAX_STREAMS_OF_ACCOUNT, EventFeed, LineReader
from posttrain.web.request_bodies import RequestRejected


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "POLL_SECONDS", 0.01)


def run(listen: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a test in a thread of its own: in this one Playwright may have a loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(listen())).result(120)


async def take(stream: AsyncIterator[str], kind: str) -> tuple[int, Any]:
    """Number and content of the next event of a kind."""
    async with asyncio.timeout(20):
        async for text in stream:
            fields = dict(line.split(": ", 1) for line in text.strip().split("\n"))
            if fields.get("event") == kind:
                return int(fields["id"]), json.loads(fields["data"])
    raise AssertionError("the stream has ended")


def append(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_state_rows_and_lines_come_as_they_are_written(server: Any) -> None:
    home = server.site.workspace.home
    append(home / "run.log", "2026-01-01 round 1: score\n")

    async def listen() -> None:
        stream = EventFeed(server.site).subscribe("viewer")
        _, state = await take(stream, "status")
        assert (state["round"], state["rounds"]) == (None, [])
        append(home / "metrics" / "key.jsonl", '{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
        _, row = await take(stream, "training")
        assert row == {"run": "key", "row": {"step": 1, "loss": 2.5}}
        append(home / "metrics" / "key.jsonl", 'ss": NaN}\n')
        _, row = await take(stream, "training")
        assert row == {"run": "key", "row": {"step": 2, "loss": None}}
        append(home / "run.log", "hook: curl -H 'Authorization: Bearer geheimnis'\nzwei\r\n")
        _, line = await take(stream, "log")
        assert line == {"line": "hook: curl -H 'Authorization: Bearer ***'"}

    run(listen)


def test_a_client_that_comes_back_gets_what_it_missed_and_nothing_twice(server: Any) -> None:
    log = server.site.workspace.home / "run.log"
    append(log, "zero\n")

    async def listen() -> None:
        feed = EventFeed(server.site)
        other = feed.subscribe("viewer")
        assert (await take(other, "log"))[1] == {"line": "zero"}
        append(log, "one\ntwo\nthree\n")
        number, line = await take(other, "log")
        assert line == {"line": "one"}
        again = feed.subscribe("viewer", last=number)
        assert [(await take(again, "log"))[1]["line"] for _ in range(2)] == ["two", "three"]
        # A number of an earlier server says nothing here.
        stranger = feed.subscribe("viewer", last=10**6)
        assert [(await take(stranger, "log"))[1]["line"] for _ in range(4)] == ["zero", "one", "two", "three"]
        assert (await take(stranger, "status"))[1]["round"] is None

    run(listen)


def test_streams_are_few_and_end_with_the_server(server: Any) -> None:
    async def listen() -> None:
        feed = EventFeed(server.site)
        streams = [feed.subscribe("viewer") for _ in range(MAX_STREAMS_OF_ACCOUNT)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(RequestRejected, match="too many open streams"):
            feed.subscribe("viewer")
        others = [feed.subscribe(f"name{number}") for number in range(MAX_STREAMS - len(streams))]
        for stream in others:
            await anext(stream)
        with pytest.raises(RequestRejected, match="too many open streams"):
            feed.subscribe("another")
        await streams[0].aclose()
        others.append(feed.subscribe("another"))
        server.site.ending.set()
        async with asyncio.timeout(20):
            for stream in [*streams, *others]:
                async for _ in stream:
                    pass
        assert feed._streams.total() == 0

    run(listen)


def test_streams_count_from_their_admission_and_never_after_their_end(server: Any) -> None:
    async def listen() -> None:
        feed = EventFeed(server.site)
        admitted, refused = [], 0
        for _ in range(200):  # before any of them begins
            try:
                admitted.append(feed.subscribe("viewer"))
            except RequestRejected:
                refused += 1
        assert (len(admitted), refused) == (MAX_STREAMS_OF_ACCOUNT, 200 - MAX_STREAMS_OF_ACCOUNT)
        await anext(admitted[0])
        for stream in [*admitted, *admitted]:
            await stream.aclose()  # of most nothing was read
        assert feed._streams.total() == 0
        feed.subscribe("viewer")

    run(listen)


async def request(server: Any, secret: str, ended: asyncio.Event, statuses: list[int], bodies: list[str]) -> None:
    """Requests the events, until the server or ``ended`` ends them."""
    headers = [(b"host", b"localhost:8600"), (b"authorization", f"Bearer {secret}".encode())]
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "root_path": ""}
    scope |= {"path": "/api/events", "raw_path": b"/api/events", "query_string": b"", "headers": headers}
    scope |= {"client": ("127.0.0.1", 1), "server": ("localhost", 8600)}

    async def receive() -> Any:
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        else:
            bodies.append(message.get("body", b"").decode())

    await server.app(scope, receive, send)


def test_a_stream_ends_with_the_right_to_read_the_loop(server: Any) -> None:
    accounts, log = server.site.accounts, server.site.workspace.home / "run.log"
    secret = accounts.tokens.issue_api_token("viewer", "test", "viewer")
    bodies: list[str] = []

    async def listen() -> None:
        ended = asyncio.Event()
        stream = asyncio.create_task(request(server, secret, ended, [], bodies))
        try:
            async with asyncio.timeout(20):
                append(log, "before\n")
                while "before" not in "".join(bodies):
                    await asyncio.sleep(0.01)
                accounts.set_role("viewer", "annotator", "owner")
                append(log, "after\n")
                await asyncio.shield(stream)
        finally:
            ended.set()
            await stream

    run(listen)
    assert "after" not in "".join(bodies)


def test_many_requests_at_once_open_few_streams(server: Any) -> None:
    secret = server.site.accounts.tokens.issue_api_token("viewer", "test", "viewer")
    statuses: list[int] = []

    async def listen() -> None:
        for _ in range(2):  # those of the first time count no more in the second
            statuses.clear()
            ended = asyncio.Event()
            requests = [asyncio.create_task(request(server, secret, ended, statuses, [])) for _ in range(60)]
            async with asyncio.timeout(20):
                while len(statuses) < len(requests):
                    await asyncio.sleep(0.01)
                ended.set()
                await asyncio.gather(*requests)
            assert sorted(statuses) == [200] * MAX_STREAMS_OF_ACCOUNT + [429] * (60 - MAX_STREAMS_OF_ACCOUNT)

    run(listen)


def test_a_closed_account_is_told_nothing_more(server: Any) -> None:
    log = server.site.workspace.home / "run.log"
    accounts = server.site.accounts
    secret = accounts.tokens.issue_api_token("viewer", "test", "viewer")

    def is_allowed() -> bool:
        if (server.site.workspace.home / "away").exists():
            raise WorkError("the database is away")
        return accounts.tokens.authenticate(secret, "api") is not None

    async def listen() -> None:
        stream = EventFeed(server.site).subscribe("viewer", 0, is_allowed)
        append(log, "before\n")
        assert (await take(stream, "log"))[1] == {"line": "before"}
        append(server.site.workspace.home / "away", "")
        append(log, "while the database is away\n")
        next_line = asyncio.create_task(take(stream, "log"))
        await asyncio.sleep(0.1)
        assert not next_line.done()
        (server.site.workspace.home / "away").unlink()
        assert (await next_line)[1] == {"line": "while the database is away"}
        accounts.close("viewer", "owner")
        append(log, "after\n")
        async with asyncio.timeout(20):
            assert [text async for text in stream if "after" in text] == []

    run(listen)


def test_a_reader_starts_near_the_end_and_follows_a_file_that_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert list(LineReader(path).lines()) == []
    append(path, "".join(f"line {number:06}\n" for number in range(10_000)))
    reader = LineReader(path)
    first = list(reader.lines())
    assert 4000 < len(first) < 6000
    assert (first[0][:5], first[-1]) == ("line ", "line 009999")
    path.write_text("new\n")
    assert list(reader.lines()) == ["new"]
    path.write_bytes(b"new\n" + b"x" * 2**20 + b"\n\xff\nend\n")
    lines = [line for _ in range(10) for line in reader.lines()]
    assert lines[-2:] == ["\ufffd", "end"]
    assert sum(map(len, lines[:-2])) == 2**20
