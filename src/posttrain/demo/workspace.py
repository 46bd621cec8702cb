"""Creates the demo's workspace: the bundled task or the user's labelled file, and a config that uses every stage."""

import hashlib
import logging
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from posttrain.data.config import DataConfig
from posttrain.data.reading.columns import detect_columns
from posttrain.data.sets.pool_and_test import build_pool_and_test
from posttrain.demo.messages import generate, write_csv, write_demo_data
from posttrain.demo.size import ROUNDS, Machine, choose_size
from posttrain.models.embedder_source import MINILM_PACKAGE
from posttrain.select.config import CHAMPION
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder, write_atomically
from posttrain.store.hashing import file_digest
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

_CONFIG = """\
# The demo{sized}: {rounds} rounds of {per_round} labels.
# A careless annotator, wrong {wrong:.0%} of the time, labels round {careless}.
model: {model}
precision: {precision}
rounds: {rounds}
task:
  system: Name the intent of the message.
  labels: labels.txt
data:
  pool: pool.csv
  test: test.csv
  columns: {{prompt: text, completion: intent{group}}}
  steps: [exact, conflicts, {{minhash: {{threshold: 0.75}}}}, {{decontaminate: {{threshold: 0.75}}}}]
select:
  pool_sample: {pool_sample}
  embeddings: {embeddings}
label:
  annotator: oracle
  file: answers.csv
  per_round: {per_round}
  error_rate: {{{careless}: {wrong}}}
train: {train}
evaluate:
  suites:
    test: {{sample: {sample}}}
  latency: {{prompts: 0}}
gate:
  deploy: [{deploy}]
"""

_FULL: dict[str, Any] = {
    "model": "smollm2-135m",
    "messages": {"pool": 1500, "test": 300},
    "rounds": ROUNDS,
    "careless": 3,
    "wrong": 0.4,
    "deploy": "gain.accuracy.low > 0",
    # The loss of an epoch in which nothing was left to learn.
    "train": "{{epochs: {epochs}, stop_loss: 0.01, learning_rate: 3.0e-4, batch_size: 16}}",
}
_QUICK = _FULL | {
    "model": "tiny",
    "messages": {"pool": 600, "test": 150},
    "precision": "float32",
    "embeddings": "champion",
    "per_round": 48,
    "epochs": 4,
    "pool_sample": 96,
    "sample": 75,
    "sized": "",
    "deploy": "accuracy >= champion.accuracy * 1.02",
    "train": "{{start: champion, epochs: {epochs}, learning_rate: 3.0e-3, batch_size: 8,"
    " checkpoint: {{every_seconds: 1}}}}",
}


def prepare_workspace(folder: Path, *, quick: bool, data: Path | None, minutes: float = 8) -> None:
    """Creates the demo's workspace, or keeps an equal one, so that a killed demo resumes.

    Args:
        folder: The workspace's folder.
        quick: True for the tiny model, whose demo has one size.
        data: The user's own labelled file; None for the bundled task.
        minutes: What the demo may take about; its size on this machine is chosen once, and kept in the config.

    Raises:
        UserError: if another workspace is there, or the user's file holds no texts with two different labels.
    """
    settings = _QUICK if quick else _FULL | {"sized": f", sized for {minutes:g} minutes"}
    if data is not None and not data.is_file():
        raise UserError("there is no such file", where=str(data), fix="check the path")
    path = folder / CONFIG_FILE
    # The config is written last and holds the data's digest: equal bytes mean that the same demo was set up
    # completely.
    if path.exists():
        content = path.read_bytes()
        sizes = _read_sizes(content)
        if sizes is None or content != _format_config(settings | sizes, data):
            raise UserError("another workspace is here", where=str(folder), fix="name another folder with --dir")
        Workspace.create(folder).close()
        return
    own = _read_own_rows(data) if data else None
    bundled = generate(**settings["messages"]) if own is None else None
    if not quick:
        rows = bundled.pool if bundled else own or []
        settings |= _size_to_machine(minutes, [row["text"] for row in rows])
    make_folder(folder)
    Workspace.create(folder).close()
    if bundled:
        write_demo_data(folder, bundled)
    else:
        _write_own(folder, own or [])
    write_atomically(path, _format_config(settings, data))


def _format_config(settings: dict[str, Any], data: Path | None) -> bytes:
    group = ", group: customer" if data is None else ""
    # Formatted twice: the train section names its own sizes.
    train = settings["train"].format(**settings)
    config = _CONFIG.format(**settings | {"train": train}, group=group)
    # The digest makes the config differ for another file of the same name.
    return (config + ("" if data is None else f"# {data.name}, SHA-256 {file_digest(data)}\n")).encode()


def _size_to_machine(minutes: float, texts: list[str]) -> dict[str, Any]:
    """Measures the machine, sizes the demo, and logs how long it will take."""
    machine = Machine.measure()
    mean_words = sum(len(text.split()) for text in texts) / len(texts)
    size = choose_size(minutes, machine, mean_words)
    log.info(
        "about %.0f minutes on this machine: %d rounds of %d labels, at most %d epochs",
        size.seconds(machine, mean_words) / 60,
        ROUNDS,
        size.per_round,
        size.epochs,
    )
    embeddings = "minilm" if find_spec(MINILM_PACKAGE) else CHAMPION
    return {"precision": machine.precision, "embeddings": embeddings, **asdict(size)}


def _read_sizes(config: bytes) -> dict[str, Any] | None:
    """Reads what `_size_to_machine` chose back from a config; None if it is not a demo's."""
    try:
        values = yaml.safe_load(config)
        return {
            "precision": values["precision"],
            "embeddings": values["select"]["embeddings"],
            "per_round": values["label"]["per_round"],
            "epochs": values["train"]["epochs"],
            "pool_sample": values["select"]["pool_sample"],
            "sample": values["evaluate"]["suites"]["test"]["sample"],
        }
    except (yaml.YAMLError, KeyError, TypeError):
        return None


def _read_own_rows(file: Path) -> list[dict[str, str]]:
    """Reads the user's records as text and intent."""
    columns = detect_columns(file, str(file), "call them `text` and `label`").mapping
    built = build_pool_and_test(DataConfig(labelled=[str(file.absolute())], test=0.25, columns=columns), Path("/"))
    own = []
    for name in ("labelled", "test"):
        for record in getattr(built, name).to_pylist():
            text = record["text"] or " ".join(turn["content"] for turn in record["prompt"])
            own.append({"text": text, "intent": record["completion"]})
    if len({row["intent"] for row in own}) < 2:
        raise UserError("the demo needs at least two different labels", where=str(file), fix="name another file")
    return own


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
