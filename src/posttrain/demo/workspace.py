"""The demo's workspace: the bundled task or the user's own labelled file, and a config that shows every stage."""

import csv
import hashlib
from pathlib import Path
from typing import Any

from posttrain.data.config import DataConfig
from posttrain.data.pipeline import build_pool_and_test
from posttrain.demo.messages import generate, write
from posttrain.loop.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically, writing
from posttrain.store.hashing import file_digest
from posttrain.store.workspace import Workspace

_PROMPT_COLUMNS = ("text", "message", "utterance", "query", "question", "sentence", "input", "prompt")
_LABEL_COLUMNS = ("intent", "label", "category", "class", "target", "completion", "output")

_CONFIG = """\
# The demo: {rounds} rounds of {per_round} labels.
# A careless annotator, wrong {wrong:.0%} of the time, labels round {careless}.
model: {model}
rounds: {rounds}
task:
  system: Name the intent of the message.
  labels: labels.txt
data:
  pool: pool.csv
  test: test.csv
  columns: {{prompt: text, completion: intent{group}}}
  near_duplicates: 0.75
  leak: 0.75
select:
  pool_sample: {pool_sample}
label:
  annotator: oracle
  file: answers.csv
  per_round: {per_round}
  error_rate: {{{careless}: {wrong}}}
train: {train}
evaluate:
  suites:
    test: {{sample: {sample}}}
  latency: {latency}
gate:
  deploy: [{deploy}]
"""

_FULL: dict[str, Any] = {
    "model": "smollm2-135m",
    "rounds": 4,
    "per_round": 48,
    "pool_sample": 300,
    "sample": 200,
    "careless": 4,
    "wrong": 0.4,
    "latency": "{prompts: 6, repeats: 4}",
    "train": "{epochs: 6, learning_rate: 3.0e-4, batch_size: 16}",
    "deploy": "accuracy >= champion.accuracy * 1.02, latency_p99 <= champion.latency_p99 * 1.5",
}
_QUICK = _FULL | {
    "model": "tiny",
    "rounds": 3,
    "careless": 3,
    "per_round": 80,
    "pool_sample": 120,
    "sample": 100,
    "latency": "{prompts: 4, repeats: 2}",
    # Ten milliseconds of a tiny model, asked so few times, are the machine's noise: they decide nothing.
    "deploy": "accuracy >= champion.accuracy * 1.02",
    "train": "{start: champion, epochs: 4, learning_rate: 3.0e-3, batch_size: 8, precision: float32,"
    " checkpoint_seconds: 1}",
}


def prepare(folder: Path, *, quick: bool, data: Path | None) -> None:
    """Make the demo's workspace, or leave the one that is there, so that a killed demo goes on.

    Raises:
        UserError: if another workspace is there, or the user's file does not hold two columns we know.
    """
    settings = _QUICK if quick else _FULL
    group = ", group: customer" if data is None else ""
    config = _CONFIG.format(**settings, group=group).encode()
    if data is not None:
        if not data.is_file():
            raise UserError("there is no such file", where=str(data), fix="check the path")
        config += f"# {data.name}, SHA-256 {file_digest(data)}\n".encode()
    path = folder / CONFIG_FILE
    if path.exists():
        if path.read_bytes() != config:
            raise UserError("another workspace is here", where=str(folder), fix="name another folder with --dir")
        Workspace.create(folder).close()
        return
    rows = _own_rows(data) if data else None
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    Workspace.create(folder).close()
    if rows is None:
        write(folder, generate())
    else:
        _write_own(folder, rows)
    write_atomically(path, config)  # last: with it the workspace is complete


def _own_rows(file: Path) -> list[dict[str, str]]:
    """The user's records as text and intent."""
    built = build_pool_and_test(
        DataConfig(labelled=[str(file.absolute())], test=0.25, columns=_columns(file)), Path("/")
    )
    rows = []
    for name in ("labelled", "test"):
        for record in getattr(built, name).to_pylist():
            text = record["text"] or " ".join(turn["content"] for turn in record["prompt"])
            rows.append({"text": text, "intent": record["completion"]})
    return rows


def _columns(file: Path) -> dict[str, str] | None:
    """Which columns of a CSV hold the text and the label; None for shapes that the reader knows by itself."""
    if file.suffix not in (".csv", ".tsv") or not file.is_file():
        return None
    with file.open(encoding="utf-8", newline="") as lines:
        header = next(csv.reader(lines, delimiter="\t" if file.suffix == ".tsv" else ","), [])
    prompt = next((name for name in _PROMPT_COLUMNS if name in header), None)
    label = next((name for name in _LABEL_COLUMNS if name in header), None)
    if prompt is None or label is None:
        raise UserError(
            f"cannot tell text and label apart in the columns {', '.join(header)}",
            where=f"{file}:1",
            fix="call them `text` and `label`",
        )
    return {"prompt": prompt, "completion": label}


def _write_own(folder: Path, rows: list[dict[str, str]]) -> None:
    """Hold a quarter out for the test by the text's hash, and hide the others' labels from the pool."""
    test = [row for row in rows if _held_out(row["text"])]
    pool = [row for row in rows if not _held_out(row["text"])]
    labels = sorted({row["intent"] for row in rows})
    if len(labels) < 2:
        raise UserError("the demo needs at least two different labels", where="--data")
    for name, columns, part in (
        ("pool.csv", ["text"], pool),
        ("answers.csv", ["text", "intent"], pool),
        ("test.csv", ["text", "intent"], test),
    ):
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(part)
    (folder / "labels.txt").write_text("\n".join(labels) + "\n", encoding="utf-8")


def _held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 64
