"""Many people at once, in threads, and in processes that are killed: no label is lost or counted twice."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from queues import LABELS, Clock, answer_all, new_items

from faults import start
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import QueueConfig
from posttrain.store.journal import Journal
from posttrain.store.metadata import Metadata
from posttrain.store.verify import verify_database

Acknowledged = list[tuple[int, str, str]]


def submit(url: str, journal: Path, names: list[str], log: Path) -> None:
    """Answers as these people until there is nothing left, and logs what was acknowledged."""
    queue = Queue(Metadata(url, journal=Journal(journal)))

    def work(name: str) -> None:
        draws = random.Random(name)
        while (task := queue.next(name)) is not None:
            answer = draws.choice(LABELS)
            queue.answer(task.item, name, answer)
            with log.open("a") as file:
                file.write(json.dumps([task.item, name, answer]) + "\n")

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def logged(log: Path) -> Acknowledged:
    """The acknowledged answers; a line that a kill cut off was not."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


class LoadContract:
    @pytest.fixture
    def journal(self, tmp_path: Path) -> Path:
        return tmp_path / "journal.jsonl"

    @pytest.fixture
    def queue(self, url: str, journal: Path) -> Iterator[Queue]:
        metadata = Metadata(url, create=True, journal=Journal(journal))
        yield Queue(metadata, QueueConfig(overlap=2))
        metadata.close()

    def check(self, queue: Queue, acknowledged: Acknowledged, journal: Path) -> None:
        table = queue.answers()
        stored = list(zip(*(table[name].to_pylist() for name in ("item", "annotator", "answer")), strict=True))
        assert set(acknowledged) <= set(stored)
        assert max(Counter((item, name) for item, name, _ in stored).values()) == 1
        for item in queue.items("b"):
            assert item.answered == len(item.answers) <= item.wanted <= 3
        assert verify_database(queue.metadata, Journal(journal)) == []

    def test_threads_of_two_servers(self, url: str, queue: Queue, journal: Path) -> None:
        queue.add_batch("b", "choice", new_items(30), labels=LABELS)
        other = Queue(Metadata(url, journal=Journal(journal)), queue.config)
        acknowledged: Acknowledged = []
        errors: list[BaseException] = []

        def work(queue: Queue, name: str) -> None:
            draws = random.Random(name)
            try:
                while (task := queue.next(name)) is not None:
                    answer = draws.choice(LABELS)
                    queue.answer(task.item, name, answer)
                    acknowledged.append((task.item, name, answer))
            except BaseException as error:  # noqa: BLE001 - the test reports it
                errors.append(error)

        threads = [threading.Thread(target=work, args=((queue, other)[n % 2], f"a{n}")) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        other.metadata.close()
        assert errors == []
        self.check(queue, acknowledged, journal)
        assert len(acknowledged) == queue.progress("b").answers
        # The last items may have been somebody's when the others asked.
        for name in ("yan", "zoe"):
            answer_all(queue, name)
        assert queue.progress("b").open == 0

    def test_killed_processes_lose_no_acknowledged_label(self, url: str, queue: Queue, journal: Path) -> None:
        queue.add_batch("b", "choice", new_items(400), labels=LABELS)
        logs = [journal.with_name(f"acknowledged {number}") for number in range(2)]
        people = [[f"{number} {m}" for m in range(3)] for number in range(2)]
        processes = [start(partial(submit, url, journal, names, log)) for names, log in zip(people, logs, strict=True)]
        # Of both together: SQLite may let one process wait until the other has answered everything.
        while sum(len(logged(log)) for log in logs) < 60:
            time.sleep(0.01)
        for process in processes:
            process.kill()
        acknowledged = [*logged(logs[0]), *logged(logs[1])]
        # As the next start does.
        metadata = Metadata(url, journal=Journal(journal))
        # The leases of the dead end, and the items are there for others.
        clock = Clock()
        clock.forward(11)
        again = Queue(metadata, queue.config, clock)
        self.check(again, acknowledged, journal)
        first = again.next("zoe")
        assert first is not None
        assert first.item == min(item.id for item in again.items("b", "open"))
        metadata.close()


@pytest.mark.slow
class TestSQLiteLoad(LoadContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.slow
class TestPostgreSQLLoad(LoadContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url
