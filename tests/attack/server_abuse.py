"""Abuses a real feedback server while honest clients post: every acknowledged entry must be in the inbox.

By hand, for as long as you like: ``python tests/attack/server_abuse.py --seconds 600``.
"""

import argparse
import http.client
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.segment import sealed_segments
from posttrain.store.checked_lines import read_lines

HEAD_SECONDS, BODY_SECONDS, MAX_CONNECTIONS = 0.5, 0.8, 64
# What a busy machine with two cores may add to a limit of the server.
MARGIN_SECONDS = 10.0
MAX_GROWTH_BYTES = 200 * 2**20
MAX_THREADS = 8

GOOD = {"prompt": "question", "completion": "answer", "rating": "up"}
LINE = b"POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Broken(AssertionError):
    """The server broke a promise."""


@dataclass
class Result:
    """Counts of what happened: ``attacks`` by class and answer; ids of ``acknowledged`` entries; the slowest answer."""

    attacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    acknowledged: set[str] = field(default_factory=set)
    stored: int = 0
    slowest: float = 0.0
    growth: int = 0
    threads: int = 0
    problems: list[str] = field(default_factory=list)


# --- Attacks: each gets the port and a random generator, and returns what the server answered. ---


def connect(port: int, timeout: float = HEAD_SECONDS + BODY_SECONDS + MARGIN_SECONDS) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout)


def exchange(port: int, data: bytes) -> str:
    """Sends bytes, and returns the status of the first answer, or how the connection ended."""
    with connect(port) as connection:
        # Closed while it was sent, the answer may have arrived all the same.
        with suppress(OSError):
            connection.sendall(data)
        return read_status(connection)


def read_status(connection: socket.socket) -> str:
    try:
        answer = connection.recv(2**16)
    except TimeoutError:
        raise Broken("the server neither answered nor closed the connection in time") from None
    except OSError:
        return "reset"
    return answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"


def trickle(port: int, start: bytes, piece: bytes) -> str:
    """Sends ``start`` and then a piece at a time, until the server ends it."""
    with connect(port) as connection:
        end = time.monotonic() + HEAD_SECONDS + BODY_SECONDS + MARGIN_SECONDS
        connection.sendall(start)
        connection.settimeout(0.05)
        while time.monotonic() < end:
            try:
                answer = connection.recv(2**16)
                return answer[9:12].decode() or "closed"
            except TimeoutError:
                pass
            except OSError:
                return "reset"
            with suppress(OSError):
                connection.sendall(piece)
    raise Broken("the server waits for a slow client without end")


def slow_head(port: int, random: random.Random) -> str:
    return trickle(port, b"POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\n", b"X-Padding: 1\r\n")


def slow_body(port: int, random: random.Random) -> str:
    return trickle(port, LINE + b"Content-Length: 1000000\r\n\r\n{", b" ")


def slow_chunks(port: int, random: random.Random) -> str:
    return trickle(port, LINE + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n")


def slow_rest(port: int, random: random.Random) -> str:
    """Goes on sending a body after the answer, which did not need it."""
    with connect(port) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        status = read_status(connection)
        end = time.monotonic() + HEAD_SECONDS + BODY_SECONDS + MARGIN_SECONDS
        while time.monotonic() < end:
            try:
                connection.sendall(b" ")
            except OSError:
                return status
            time.sleep(0.05)
    raise Broken("the server reads the rest of a refused request without end")


def silent(port: int, random: random.Random) -> str:
    with connect(port) as connection:
        return read_status(connection)


def many_connections(port: int, random: random.Random) -> str:
    """Opens twice as many connections as there may be, and holds them."""
    connections = []
    try:
        for _ in range(2 * MAX_CONNECTIONS):
            with suppress(OSError):
                connections.append(connect(port))
        time.sleep(0.2)
    finally:
        for connection in connections:
            connection.close()
    return f"{2 * MAX_CONNECTIONS} opened"


def huge_body(port: int, random: random.Random) -> str:
    return exchange(port, LINE + b"Content-Length: 1073741824\r\n\r\n" + b"x" * 2**22)


def huge_chunks(port: int, random: random.Random) -> str:
    return exchange(port, LINE + b"Transfer-Encoding: chunked\r\n\r\n" + (b"8000\r\n" + b"x" * 2**15 + b"\r\n") * 64)


def tiny_chunks(port: int, random: random.Random) -> str:
    return exchange(port, LINE + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 30_000 + b"0\r\n\r\n")


def wrong_length(port: int, random: random.Random) -> str:
    body = json.dumps({**GOOD, "id": f"wrong-{random.random()}"}).encode()
    length = random.choice([b"-1", b"1e3", b"0x10", b"", b"5, 6", b"99999999999999999999999", b"2", b"\xb2"])
    return exchange(port, LINE + b"Content-Length: " + length + b"\r\n\r\n" + body)


def two_lengths(port: int, random: random.Random) -> str:
    return exchange(port, LINE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}    ")


def bad_host(port: int, random: random.Random) -> str:
    hosts = ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "[::1", "10.0.0.1", "", "localhost/x"]
    host = random.choice(hosts).encode()
    head = random.choice([b"Host: " + host + b"\r\n", b"Host: localhost\r\nHost: " + host + b"\r\n", b""])
    return exchange(port, b"GET /v1/status HTTP/1.1\r\n" + head + b"\r\n")


def bad_method(port: int, random: random.Random) -> str:
    method = random.choice(
        [b"TRACE", b"PUT", b"DELETE", b"CONNECT", b"post", b"G T", b"\0", b"PRI * HTTP/2.0", b"A" * 999]
    )
    return exchange(port, method + b" /v1/feedback HTTP/1.1\r\nHost: localhost\r\n\r\n")


def path_trick(port: int, random: random.Random) -> str:
    paths = ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//v1/status", "/v1/status/../../x", "/v1/%00status"]
    paths += ["/" + "a" * 60_000, "http://evil.example/v1/status", "*", "/v1/status%0d%0aX: y", "/\xff", "/;/v1/status"]
    return exchange(port, b"GET " + random.choice(paths).encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")


def header_flood(port: int, random: random.Random) -> str:
    headers = random.choice([b"X: y\r\n" * 50_000, b"X: " + b"y" * 2**20 + b"\r\n", b"X" * 2**20])
    return exchange(port, LINE + headers + b"\r\n")


def broken_chunks(port: int, random: random.Random) -> str:
    chunks = [
        b"zz\r\n",
        b"-5\r\nabcde\r\n",
        b"f" * 40 + b"\r\n",
        b"5\r\nab\r\n\r\n",
        b"5;" + b"a" * 2**17,
        b"2\r\n{}XX0\r\n\r\n",
    ]
    return exchange(port, LINE + b"Transfer-Encoding: chunked\r\n\r\n" + random.choice(chunks))


def pipelined(port: int, random: random.Random) -> str:
    requests = [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"]
    requests += [LINE + b"Content-Length: 2\r\n\r\n{}"]
    return exchange(port, b"".join(random.choices(requests, k=50)) + b"garbage\r\n\r\n")


def unread_answers(port: int, random: random.Random) -> str:
    """Asks for more than fits into the buffers of the connection, and takes none of it."""
    with connect(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1)
        with suppress(OSError):
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
    return "left"


def torn_request(port: int, random: random.Random) -> str:
    """Ends with a reset in the middle of a request, as a killed client does."""
    body = json.dumps({**GOOD, "id": f"torn-{random.random()}"}).encode()
    data = LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body
    connection = connect(port)
    connection.sendall(data[: random.randrange(len(data) + 1)])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return "left"


def hostile_json(port: int, random: random.Random) -> str:
    good = json.dumps({**GOOD, "id": "hostile"})
    bodies = [
        good.replace("{", '{"id": "first", ', 1).encode(),
        ("{" + ",".join(f'"k{number}":1' for number in range(60_000)) + ',"k59999":2}').encode(),
        good.replace('"up"', "1e999").encode(),
        good.replace('"up"', "9" * 4000).encode(),
        good.replace('"up"', "NaN").encode(),
        good.replace("question", "\\ud800").encode(),
        good.encode("utf-16"),
        b"\xff" * 1000,
        b"[" * 500_000,
        b'{"a":' * 100_000,
        json.dumps({**GOOD, "id": "x" * 900_000}).encode(),
    ]
    body = random.choice(bodies)
    return exchange(port, LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body)


# The statuses that are right answers. Connections may be closed at any time, since there are too many.
ALLOWED: dict[Callable[[int, random.Random], str], tuple[str, ...]] = {
    slow_head: ("408",),
    slow_body: ("408",),
    slow_chunks: ("408",),
    slow_rest: ("404",),
    silent: ("408",),
    many_connections: (f"{2 * MAX_CONNECTIONS} opened",),
    # 408 where the rest of the body, which is read and discarded, takes too long.
    huge_body: ("408", "413"),
    huge_chunks: ("408", "413"),
    tiny_chunks: ("400",),
    wrong_length: ("400", "413"),
    two_lengths: ("400",),
    bad_host: ("400", "421"),
    bad_method: ("400", "404", "405"),
    path_trick: ("400", "404"),
    header_flood: ("400",),
    broken_chunks: ("400", "408"),
    pipelined: ("200", "404", "422"),
    unread_answers: ("left",),
    torn_request: ("left",),
    hostile_json: ("400", "422"),
}
# 408 where this machine is too busy to send a request in half a second.
ENDINGS = ("closed", "reset", "503", "408")


# --- The server, the honest clients, and the check at the end. ---


def start_server(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Starts the server of `main` with ``--serve``; returns the process and its port."""
    command = [sys.executable, __file__, "--serve", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        raise Broken("the server did not start")
    return process, int(address.rpartition(":")[2])


def serve_folder(folder: Path) -> None:
    from posttrain.web.feedback import feedback_app
    from posttrain.web.server import serve

    limits: dict[str, Any] = {"head_seconds": HEAD_SECONDS, "body_seconds": BODY_SECONDS}
    with Inbox(folder, segment_bytes=200_000) as inbox:
        app = feedback_app(inbox)
        serve(
            app, "127.0.0.1", 0, lambda address: print(address, flush=True), max_connections=MAX_CONNECTIONS, **limits
        )


def process_facts(pid: int) -> tuple[int, int]:
    """Returns the resident bytes and the threads of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024, int(lines["Threads"])


def post_honestly(port: int, name: str, ended: threading.Event, result: Result) -> None:
    number = 0
    while not ended.is_set():
        id = f"{name}-{number}"
        body = json.dumps({**GOOD, "id": id})
        start = time.monotonic()
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MARGIN_SECONDS)
                connection.request("POST", "/v1/feedback", body, {"Content-Type": "application/json"})
                status = connection.getresponse().status
                connection.close()
            except (OSError, http.client.HTTPException):
                status = 0
            if status == 201:
                break
            if ended.is_set():
                return
            # 408 where this machine is too busy to send a request in half a second.
            if status not in (0, 408, 503):
                result.problems.append(f"an honest client was answered {status}")
                return
            if time.monotonic() - start > MARGIN_SECONDS:
                result.problems.append("an honest client was not served in time")
                return
        result.acknowledged.add(id)
        result.slowest = max(result.slowest, time.monotonic() - start)
        number += 1


def attack(port: int, seed: int, ended: threading.Event, result: Result, chosen: list[Callable[..., str]]) -> None:
    draw = random.Random(seed)
    while not ended.is_set():
        # Every class once, in mixed order, before any comes again.
        for abuse in draw.sample(chosen, len(chosen)):
            if ended.is_set():
                return
            try:
                answer = abuse(port, draw)
            except Broken as error:
                result.problems.append(f"{abuse.__name__}: {error}")
                continue
            except OSError:
                answer = "refused"
            if ended.is_set():
                return
            result.attacks[abuse.__name__, answer] += 1
            if answer not in (*ALLOWED[abuse], *ENDINGS):
                result.problems.append(f"{abuse.__name__} was answered {answer}")


def run_round(folder: Path, result: Result, *, seconds: float, seed: int, attackers: int, end: signal.Signals) -> None:
    """Starts a server, abuses it for a while, ends it by a signal amid the requests, and looks into the inbox."""
    process, port = start_server(folder)
    ended = threading.Event()
    try:
        before, _ = process_facts(process.pid)
        honest = [
            threading.Thread(target=post_honestly, args=(port, f"{seed}-{worker}", ended, result))
            for worker in range(2)
        ]
        patient = [abuse for abuse in ALLOWED if abuse is not many_connections]
        shares = [patient[worker::attackers] for worker in range(attackers)]
        abusers = [
            threading.Thread(target=attack, args=(port, seed * 100 + worker, ended, result, share))
            for worker, share in enumerate(shares)
        ]
        flood = threading.Thread(target=attack, args=(port, seed, ended, result, [many_connections]))
        for thread in (*honest, *abusers):
            thread.start()
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            time.sleep(0.1)
            # Not from the beginning: those who are slow would all be closed as too many, and never for their slowness.
            if flood.ident is None and time.monotonic() - start > seconds * 2 / 3:
                flood.start()
            if process.poll() is not None:
                result.problems.append(f"the server ended by itself with {process.returncode}")
                break
            resident, threads = process_facts(process.pid)
            result.growth, result.threads = max(result.growth, resident - before), max(result.threads, threads)
        ended.set()
        process.send_signal(end)
        code = process.wait(30)
        if end is not signal.SIGKILL and code != 0:
            result.problems.append(f"{end.name} ended the server with {code}")
        for thread in (*honest, *abusers, flood):
            if thread.ident is not None:
                thread.join(30)
    finally:
        ended.set()
        process.kill()
        process.wait()
    paths = [*sealed_segments(folder), *sorted((folder / "segments").glob("*.open"))]
    ids = [value["feedback"]["id"] for path in paths for value in read_lines(path.read_bytes()).values]
    result.stored = len(ids)
    if lost := result.acknowledged - set(ids):
        result.problems.append(f"{len(lost)} acknowledged entries are not in the inbox")
    if len(ids) != len(set(ids)):
        result.problems.append("an entry is in the inbox twice")
    if result.growth > MAX_GROWTH_BYTES:
        result.problems.append(f"the server grew by {result.growth / 2**20:.0f} MiB")
    if result.threads > MAX_THREADS:
        result.problems.append(f"the server had {result.threads} threads")


def abuse_server(folder: Path, *, seconds: float, rounds: int, seed: int = 0, attackers: int = 10) -> Result:
    """Runs rounds of abuse on one inbox; they end by SIGKILL, SIGTERM, SIGHUP and SIGINT in turn."""
    result = Result()
    ends = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    for number in range(rounds):
        end = ends[number % len(ends)]
        run_round(folder, result, seconds=seconds / rounds, seed=seed + number, attackers=attackers, end=end)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int, default=4, help="rounds, each with a server of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_folder(arguments.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = abuse_server(Path(folder), seconds=arguments.seconds, rounds=arguments.count, seed=arguments.seed)
    for (name, answer), count in sorted(result.attacks.items()):
        print(f"{name:20} {answer:12} {count:7,}")
    print(f"{sum(result.attacks.values()):,} attacks; {len(result.acknowledged):,} entries acknowledged,")
    print(f"{result.stored:,} stored; the slowest took {result.slowest:.2f} s; the server grew by")
    print(f"{result.growth / 2**20:.0f} MiB and had {result.threads} threads")
    for problem, count in Counter(result.problems).items():
        print(f"PROBLEM ({count} times): {problem}")
    sys.exit(1 if result.problems else 0)


if __name__ == "__main__":
    main()
