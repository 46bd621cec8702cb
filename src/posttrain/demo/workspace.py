"""Creates the demo's workspace: the bundled task or the user's labelled file, and a config that uses every stage."""

import hashlib
from pathlib import Path
from typing import Any

from posttrain.data.config import DataConfig
from posttrain.data.reading.conversion import shape_of
from posttrain.data.reading.data_files import has_fixed_columns
from posttrain.data.reading.formats import read_rows
from posttrain.data.reading.rows import Problem
from posttrain.data.sets.pool_and_test import build_pool_and_test
from posttrain.demo.messages import generate, write_csv, write_demo_data
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder, write_atomically
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
  steps: [exact, conflicts, {{minhash: {{threshold: 0.75}}}}, {{decontaminate: {{threshold: 0.75, contained: null}}}}]
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
    "messages": {"pool": 1500, "test": 300},
    "rounds": 3,
    "per_round": 64,
    "pool_sample": 300,
    "sample": 200,
    "careless": 3,
    "wrong": 0.4,
    "latency": "{prompts: 4, repeats: 3}",
    "train": "{epochs: 6, learning_rate: 3.0e-4, batch_size: 16}",
    "deploy": "gain.accuracy.low > 0, latency_p99 <= champion.latency_p99 * 1.5",
}
_QUICK = _FULL | {
    "model": "tiny",
    "messages": {"pool": 600, "test": 150},
    "per_round": 48,
    "pool_sample": 96,
    "sample": 75,
    "latency": "{prompts: 2, repeats: 2}",
    # Ten milliseconds of a tiny model over two prompts are noise: no rule on latency here.
    "deploy": "accuracy >= champion.accuracy * 1.02",
    "train": "{start: champion, epochs: 4, learning_rate: 3.0e-3, batch_size: 8, precision: float32,"
    " checkpoint: {every_seconds: 1}}",
}


def prepare_workspace(folder: Path, *, quick: bool, data: Path | None) -> None:
    """Creates the demo's workspace, or keeps an equal one, so that a killed demo resumes.

    Raises:
        UserError: if another workspace is there, or the user's file holds no texts with two different labels.
    """
    settings = _QUICK if quick else _FULL
    group = ", group: customer" if data is None else ""
    config = _CONFIG.format(**settings, group=group).encode()
    if data is not None:
        if not data.is_file():
            raise UserError("there is no such file", where=str(data), fix="check the path")
        # The digest makes the config differ for another file of the same name.
        config += f"# {data.name}, SHA-256 {file_digest(data)}\n".encode()
    path = folder / CONFIG_FILE
    # The config is written last and holds the data's digest: equal bytes mean that the same demo was set up
    # completely.
    if path.exists():
        if path.read_bytes() != config:
            raise UserError("another workspace is here", where=str(folder), fix="name another folder with --dir")
        Workspace.create(folder).close()
        return
    own = _read_own_rows(data) if data else None
    make_folder(folder)
    Workspace.create(folder).close()
    if own is None:
        write_demo_data(folder, generate(**settings["messages"]))
    else:
        _write_own(folder, own)
    write_atomically(path, config)


def _read_own_rows(file: Path) -> list[dict[str, str]]:
    """Reads the user's records as text and intent."""
    built = build_pool_and_test(
        DataConfig(labelled=[str(file.absolute())], test=0.25, columns=_columns(file)), Path("/")
    )
    own = []
    for name in ("labelled", "test"):
        for record in getattr(built, name).to_pylist():
            text = record["text"] or " ".join(turn["content"] for turn in record["prompt"])
            own.append({"text": text, "intent": record["completion"]})
    if len({row["intent"] for row in own}) < 2:
        raise UserError("the demo needs at least two different labels", where=str(file), fix="name another file")
    return own


def _columns(file: Path) -> dict[str, str] | None:
    """Detects the text and label columns; None for shapes whose answers the reader recognises."""
    first = next(read_rows(file, str(file)), None)
    if first is None:
        return None  # the reader reports that the file is empty
    if isinstance(first, Problem):
        raise first.error()
    header = first.values
    shape = shape_of(header)
    answerless = ("text",) if "completion" in header else ("text", "prompt")
    if shape is not None and shape.name not in answerless:
        return None
    prompt = next((name for name in _PROMPT_COLUMNS if name in header), None)
    label = next((name for name in _LABEL_COLUMNS if name in header), None)
    if prompt is None or label is None:
        raise UserError(
            f"cannot tell text and label apart in the columns {', '.join(header)}",
            where=f"{file}:{1 if has_fixed_columns(file) else first.line}",
            fix="call them `text` and `label`",
        )
    return {"prompt": prompt, "completion": label}


def _write_own(folder: Path, own: list[dict[str, str]]) -> None:
    """Holds out a quarter as the test split by the text's hash, and hides the other labels from the pool."""
    labels = sorted({row["intent"] for row in own})
    test = [row for row in own if _held_out(row["text"])]
    pool = [row for row in own if not _held_out(row["text"])]
    with disk_errors(folder):
        write_csv(folder / "pool.csv", ["text"], pool)
        write_csv(folder / "answers.csv", ["text", "intent"], pool)
        write_csv(folder / "test.csv", ["text", "intent"], test)
        (folder / "labels.txt").write_text("\n".join(labels) + "\n", encoding="utf-8")


def _held_out(text: str) -> bool:
    # By hash: a text that stands in the file twice falls on one side, and a longer file moves none.
    return hashlib.sha256(text.encode()).digest()[0] < 64
