"""Fixtures for tests of several packages: models, each created once a run, and small workspaces."""

import csv
import gc
import itertools
import os
import random
import shutil
import signal
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from endpoint_server import endpoint  # noqa: F401
from filelock import FileLock
from hub_server import hub  # noqa: F401
from hypothesis import settings
from postgres import postgres_server, postgres_url  # noqa: F401

# Set before torch is loaded: one thread a worker, or the workers' threads wait for each other's cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

# A shell starts jobs in the background with these ignored, and the programs that the tests start inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# A tenth of the time went into collecting garbage among a million objects of modules and tests, which stay anyway.
gc.set_threshold(5000, 20, 20)
gc.disable()  # until all tests are collected

# A slow machine must not fail an example. Each run draws other examples, so that few a run suffice.
settings.register_profile("no_deadline", deadline=None, max_examples=40)
settings.load_profile("no_deadline")


# The long form: whole runs in processes of their own, attacks, browsers, the commands of the documents.
LONG_FOLDERS = ("web/browser", "e2e", "attack", "fuzz")
# Of docs/ alone: other folders have fixtures of these names, too.
LONG_FIXTURES = {"page_run", "run", "run_block"}
# Above half a second: the real model, and workspaces in which a loop is run.
SLOW_FIXTURES = {"smollm2", "small", "small_anywhere", "finished_workspace", "begun_workspace"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--long``."""
    parser.addoption("--long", action="store_true", help="run the whole long form, not the seventh that is due")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks long and slow tests, keeps the long ones that are due, and puts files with slow tests first.

    A file runs in one worker: with the quick files last, the workers end at the same time.
    """
    due = None if config.getoption("long") else _seventh()
    kept, deselected = [], []
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        folder = _folder(item)
        if folder.startswith(LONG_FOLDERS) or (folder.startswith("docs/") and LONG_FIXTURES & fixtures):
            item.add_marker(pytest.mark.long)
        is_long = item.get_closest_marker("long") is not None
        if is_long or SLOW_FIXTURES & fixtures:
            item.add_marker(pytest.mark.slow)
        each_change = item.get_closest_marker("each_change") is not None
        runs = not is_long or each_change or due is None or zlib.crc32(item.nodeid.encode()) % 7 == due
        (kept if runs else deselected).append(item)
    slow = Counter(item.path for item in kept if item.get_closest_marker("slow"))
    kept.sort(key=lambda item: (item.get_closest_marker("long") is None, -slow[item.path]))
    items[:] = kept
    config.hook.pytest_deselected(items=deselected)


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).as_posix()


def _seventh() -> int:
    """The seventh of the long form that is due: by the day of the commit, so that a week of changes runs it all."""
    command = ("git", "log", "-1", "--format=%ct")
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return int(result.stdout or 0) // 86_400 % 7


def pytest_collection_finish() -> None:
    """Leave all that exists out of the collection of garbage."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Saves the interpreter a search for garbage among everything before it exits."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def float32_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of measured rates by which float32 is faster: ``precision: auto`` must not depend on the machine."""
    import torch

    from posttrain.models import machine_rate

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for dtype, flops in ((torch.float32, 1e11), (torch.bfloat16, 1e10)):
            machine_rate._write(
                machine_rate._key(dtype, "cpu"), machine_rate.MatmulRate(flops, measurements=3, quiet=3)
            )
        yield


@pytest.fixture(scope="session")
def product_pragmas() -> tuple[str, ...]:
    """The settings of SQLite outside of the tests; see `_no_waits_for_disks`."""
    from posttrain.store import database

    return database._PRAGMAS


@pytest.fixture(scope="session", autouse=True)
def _no_waits_for_disks(product_pragmas: tuple[str, ...]) -> Iterator[None]:
    """Skips fsync: only a power cut needs it, and its tests patch it themselves. A wrong descriptor still raises."""
    quick = tuple("synchronous = OFF" if "synchronous" in pragma else pragma for pragma in product_pragmas)

    def check(descriptor: int) -> None:
        os.fstat(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", check)
        patch.setattr("posttrain.store.database._PRAGMAS", quick)
        yield


@pytest.fixture(scope="session")
def _table_script() -> list[str]:
    """Statements that make the tables of an empty SQLite database; filled by the first test that needs them."""
    return []


@pytest.fixture(autouse=True)
def quick_tables(_table_script: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the migrations of empty SQLite databases once; the tests of databases run them each time."""
    from sqlalchemy import inspect

    from posttrain.store import upgrade

    migrate = upgrade.migrate

    def create_tables(connection: Any) -> None:
        if connection.dialect.name != "sqlite" or inspect(connection).get_table_names():
            migrate(connection)
        elif _table_script:
            for statement in _table_script:
                connection.exec_driver_sql(statement)
        else:
            migrate(connection)
            dump = list(connection.connection.driver_connection.iterdump())
            _table_script.extend(dump[1:-1])  # between BEGIN and COMMIT

    monkeypatch.setattr(upgrade, "migrate", create_tables)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny Llama; treat it as read-only."""
    from posttrain.models.tiny import write_tiny_model

    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    gc.freeze()  # as after the collection of tests: the libraries that this has imported stay as well
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def build_once(run_folder: Path) -> Callable[[str, Callable[[Path], object]], Path]:
    """Builds a folder in the worker that needs it first; the others wait for it. It is read-only from then on."""

    def build_folder(name: str, build: Callable[[Path], object]) -> Path:
        folder = run_folder / name
        with FileLock(run_folder / f"{name}.lock"):
            if not folder.exists():
                shutil.rmtree(run_folder / f"{name} unfinished", ignore_errors=True)  # of a build that failed
                build(run_folder / f"{name} unfinished")
                (run_folder / f"{name} unfinished").rename(folder)
        return folder

    return build_folder


@pytest.fixture(scope="session")
def smollm2(run_folder: Path) -> Path:
    """The folder of the real SmolLM2-135M-Instruct, converted from the packaged GGUF file; read-only."""
    from posttrain.models.sources import DEMO_MODEL, fetch, locate

    folder = run_folder / DEMO_MODEL
    with FileLock(run_folder / f"{DEMO_MODEL}.lock"):
        if not folder.exists():
            fetch(locate(DEMO_MODEL, run_folder), run_folder / "converting")
            (run_folder / "converting").rename(folder)
    return folder


class SmallWorkspaces:
    """Workspaces with the tiny model, four labels, 60 pool and 20 test records: two rounds take a second or two."""

    labels = ("card", "cash", "loan", "rate")
    # Measured in the tests that are about it: it takes a fifth of a round.
    latency: ClassVar[dict[str, int]] = {"prompts": 0}

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str = "workspace", **changes: Any) -> Path:
        """Write a workspace and return its folder; ``changes`` are merged into the config's sections."""
        root = self.folder / name
        rows = self.rows()
        self.write(root / "pool.csv", rows[:60], ["text"])
        self.write(root / "answers.csv", rows)
        self.write(root / "test.csv", rows[60:80])
        self.configure(root, **changes)
        return root

    def configure(self, root: Path, **changes: Any) -> None:
        """Write a new ``posttrain.yaml``."""
        config: dict[str, Any] = {
            "model": "tiny",
            "rounds": 2,
            "task": {"labels": list(self.labels)},
            "data": {
                "pool": ["pool.csv"],
                "test": ["test.csv"],
                "columns": {"prompt": "text", "completion": "label"},
                "steps": ["exact", "conflicts", {"decontaminate": dict.fromkeys(("ngram", "threshold"))}],
            },
            # The linear head in its own tests: its sentence model takes longer than two rounds.
            "label": {"annotator": "oracle", "file": "answers.csv", "per_round": 12, "embedder": None},
            "train": {"epochs": 2, "learning_rate": 4.0e-3, "precision": "float32"},
            "evaluate": {"latency": self.latency, "bootstrap": {"resamples": 200}},
            # Two epochs give little more than chance accuracy; the deployment must not depend on chance.
            "gate": {"deploy": ["accuracy >= 0"]},
        }
        for key, value in changes.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        (root / "posttrain.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    def rows(self) -> list[dict[str, str]]:
        """168 different messages with their label, always in the same mixed order."""
        phrases = ("my {} was {}", "the {} is {}", "about a {} that came {}")
        words = [
            "late",
            "lost",
            "wrong",
            "slow",
            "blue",
            "high",
            "low",
            "odd",
            "new",
            "fine",
            "due",
            "gone",
            "split",
            "cut",
        ]
        mixed = itertools.product(words, phrases, self.labels)
        rows = [{"text": phrase.format(label, word), "label": label} for word, phrase, label in mixed]
        random.Random(0).shuffle(rows)
        return rows

    def write(self, path: Path, rows: list[dict[str, str]], columns: Sequence[str] = ("text", "label")) -> None:
        """Write rows as a CSV file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


@pytest.fixture
def small(tmp_path: Path, _short_maps: None) -> SmallWorkspaces:
    return SmallWorkspaces(tmp_path)


@pytest.fixture(scope="session")
def _short_maps() -> Iterator[None]:
    """The first coordinates in place of t-SNE, for maps of pools that no test looks at: a fifth of a round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.select.pool_map.tsne_plane", lambda embeddings: embeddings[:, :2].astype("float32"))
        yield


@pytest.fixture(scope="session")
def finished_workspace(build_once: Callable[[str, Callable[[Path], object]], Path], _short_maps: None) -> Path:
    """A small workspace after two rounds; `finished_copy` is one to write to."""
    from posttrain.loop.config import load_config
    from posttrain.loop.loop import Loop
    from posttrain.store.workspace import Workspace

    def build(folder: Path) -> None:
        root = SmallWorkspaces(folder)("workspace")
        for rounds in (0, 2):
            with Workspace.create(root) as store:
                Loop(store, load_config(root)).run(rounds)
            if rounds == 0:
                shutil.copytree(root, folder / "begun", symlinks=True)

    return build_once("finished", build) / "workspace"


@pytest.fixture(scope="session")
def begun_workspace(finished_workspace: Path) -> Path:
    """The same workspace after round 0, which measures the base model; read-only, as `finished_workspace`."""
    return finished_workspace.with_name("begun")


@pytest.fixture
def finished_copy(finished_workspace: Path, tmp_path: Path) -> Path:
    """A copy of the small workspace after two rounds: 12 labels in each, both candidates deployed."""
    return Path(shutil.copytree(finished_workspace, tmp_path / "copy", symlinks=True))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of small workspaces measure latency, too."""
    monkeypatch.setattr(SmallWorkspaces, "latency", {"prompts": 2, "repeats": 1})


@pytest.fixture(scope="session")
def small_anywhere(_short_maps: None) -> type[SmallWorkspaces]:
    """`small` for fixtures that outlive a test; call it with the folder for the workspaces."""
    return SmallWorkspaces


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 API that the environment's AWS variables name."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import boto3

        boto3.client("s3").create_bucket(Bucket="posttrain")
        yield address
    server.stop()
