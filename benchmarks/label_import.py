"""Imports and exports 50,000 labelled records in each format, each in a process of its own.

    .venv/bin/python benchmarks/label_import.py [--records 50000]

Each record has a text of about 300 characters, a suggestion with a confidence, and one answer, one in five two answers.
The processor's seconds count as well as those of the clock, as other work on the machine does not change them.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from posttrain.label.formats.exporter import export_queue
from posttrain.label.formats.importer import ImportOptions, import_queue
from posttrain.label.queue import Queue
from posttrain.store.journal import Journal
from posttrain.store.metadata import Metadata

LABELS = [f"topic-{number}" for number in range(77)]
SUFFIXES = {"label-studio": ".json", "jsonl": ".jsonl", "csv": ".csv"}


def write_tasks(path: Path, records: int) -> None:
    """Writes tasks as Label Studio exports them."""
    with path.open("w") as file:
        for number in range(records):
            label = LABELS[number % len(LABELS)]
            annotations = [_annotation(number, label, 1)]
            if number % 5 == 0:
                annotations.append(_annotation(number, label, 2))
            task = {
                "id": number,
                "data": {"text": f"Message {number}: " + "where is the card that I ordered? " * 8, "source": "mail"},
                "annotations": annotations,
                "predictions": [{"model_version": "m", "score": 0.8, "result": [_region(label)]}],
                "created_at": "2024-03-09T21:52:49.513742Z",
                "project": 1,
            }
            file.write(("[" if number == 0 else ",\n") + json.dumps(task))
        file.write("]")


def _annotation(number: int, label: str, by: int) -> dict[str, object]:
    return {
        "id": 2 * number + by,
        "completed_by": by,
        "result": [_region(label)],
        "was_cancelled": False,
        "ground_truth": False,
        "created_at": "2024-03-09T22:16:08.728353Z",
        "lead_time": 4.288,
    }


def _region(label: str) -> dict[str, object]:
    return {"from_name": "topic", "to_name": "text", "type": "choices", "value": {"choices": [label]}, "id": "a"}


def _open(folder: Path) -> Queue:
    folder.mkdir(exist_ok=True)
    # With a journal, as a workspace has it.
    return Queue(Metadata(f"sqlite:///{folder / 'db.sqlite'}", create=True, journal=Journal(folder / "journal.jsonl")))


def _import(folder: Path, file: Path) -> None:
    result = import_queue(_open(folder), file, ImportOptions(batch="batch"))
    assert result.created


def _export(folder: Path, file: Path, format: str) -> None:
    export_queue(_open(folder), "batch", file, format)


def _measure(target: Callable[..., None], *arguments: object) -> str:
    """Returns the seconds of the clock and the processor, and the peak memory in MB, of a process that makes a call."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, target, *arguments))
    process.start()
    sender.close()
    cells: str = receiver.recv()
    process.join()
    return cells


def _call(sender: Connection, target: Callable[..., None], *arguments: object) -> None:
    start, processor = time.perf_counter(), time.process_time()
    target(*arguments)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sender.send(f"{time.perf_counter() - start:.1f} | {time.process_time() - processor:.1f} | {memory:.0f}")


def main() -> None:
    """Print a row a format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=50_000)
    records = parser.parse_args().records
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = root / "source.json"
        write_tasks(source, records)
        print("| format | MB | import s | processor s | peak MB | export s | processor s | peak MB |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|")
        cells = _measure(_import, root / "source", source)
        print(f"| label-studio (its own) | {source.stat().st_size / 1e6:.0f} | {cells} | | | |", flush=True)
        for format, suffix in SUFFIXES.items():
            file = root / f"{format}{suffix}"
            exported = _measure(_export, root / "source", file, format)
            imported = _measure(_import, root / format, file)
            print(f"| {format} | {file.stat().st_size / 1e6:.0f} | {imported} | {exported} |", flush=True)


if __name__ == "__main__":
    main()
