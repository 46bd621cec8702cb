"""Abuses a real feedback server while honest clients post: every acknowledged entry must be in the inbox.

By hand, for as long as you like: ``python tests/attack/server_abuse.py --seconds 600``.
"""

import argparse
import http.client
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_attacks import (
    ALLOWED,
    BODY_SECONDS,
    ENDINGS,
    GOOD,
    HEAD_SECONDS,
    MARGIN_SECONDS,
    MAX_CONNECTIONS,
    Broken,
    many_connections,
)

from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.segment import sealed_segments
from posttrain.store.hashing import read_lines

MAX_GROWTH_BYTES = 200 * 2**20
MAX_THREADS = 8


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
