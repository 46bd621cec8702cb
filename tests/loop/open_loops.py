"""Fixtures of a loop that reads its config again at every run, as the command does."""

import os
import shutil
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.inspect.status import status
from posttrain.loop.config import load_config
from posttrain.loop.loop import Loop
from posttrain.loop.model_registry import ModelRegistry
from posttrain.store.workspace import Workspace
from posttrain.web.loop_report import report_page
from posttrain.web.page import render_page


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync, which only a power cut needs, and uses one thread, as the model is small."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    torch.set_num_threads(1)


class OpenLoop:
    """An open workspace and its loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Workspace.create(root, load_config(root).store)
        self.metadata = self.store.metadata

    def run(self, *arguments: Any, **options: Any) -> str | None:
        return Loop(self.store, load_config(self.root)).run(*arguments, **options)

    @property
    def champion(self) -> str:
        deployment = ModelRegistry(self.store).champion
        assert deployment is not None
        return deployment.model_id

    @property
    def status(self) -> dict[str, Any]:
        return status(self.store, load_config(self.root))

    @property
    def page(self) -> str:
        """The report as HTML, without its entities."""
        return unescape(render_page(report_page(self.store, load_config(self.root))))

    def stages(self, status: str = "done", after: int = 0) -> list[str]:
        """``round stage`` of all runs of a status in the order of their start, without the first ``after``."""
        return [f"{run.round} {run.stage}" for run in self.metadata.runs(status=status)][after:]

    def labelled_inputs(self, round: int) -> list[str]:
        """Input ids of the records that were labelled in a round."""
        import pyarrow.parquet as parquet

        labels = self.metadata.rounds()[round].detail["labelled"]
        return list(parquet.read_table(self.store.artifacts.path(labels) / "labels.parquet")["input_id"].to_pylist())

    def trained_on(self, round: int) -> dict[str, str]:
        """Answer by input id in a round's training set."""
        import pyarrow.parquet as parquet

        dataset = self.metadata.rounds()[round].detail["dataset"]
        table = parquet.read_table(self.store.artifacts.path(dataset) / "records.parquet")
        return dict(zip(table["input_id"].to_pylist(), table["completion"].to_pylist(), strict=True))


@pytest.fixture
def open_loop() -> Iterator[Callable[[Path], OpenLoop]]:
    """Opens the loop of a workspace, and closes its store after the test."""
    loops: list[OpenLoop] = []

    def open_root(root: Path) -> OpenLoop:
        loops.append(OpenLoop(root))
        return loops[-1]

    yield open_root
    for loop in loops:
        loop.store.close()


@pytest.fixture
def begun_loop(small: Any, begun_workspace: Path, open_loop: Callable[[Path], OpenLoop]) -> Callable[..., OpenLoop]:
    """Opens the loop of a copy of the small workspace after round 0; takes changes of its config."""

    def open_copy(name: str = "workspace", **changes: Any) -> OpenLoop:
        root = Path(shutil.copytree(begun_workspace, small.folder / name, symlinks=True))
        small.configure(root, **changes)
        return open_loop(root)

    return open_copy


@pytest.fixture
def copied_loop(finished_copy: Path, open_loop: Callable[[Path], OpenLoop]) -> OpenLoop:
    """The loop of a copy of the small workspace after two rounds."""
    return open_loop(finished_copy)


@pytest.fixture(scope="session")
def evaluated_workspace(
    finished_workspace: Path, small_anywhere: Any, build_once: Callable[[str, Callable[[Path], object]], Path]
) -> Path:
    """The small workspace in round 3, whose candidate is evaluated and waits for the gate; read-only."""

    def build(folder: Path) -> None:
        shutil.copytree(finished_workspace, folder, symlinks=True)
        small_anywhere(folder.parent).configure(folder, train={"epochs": 1})
        loop = OpenLoop(folder)
        loop.run(3, until="evaluate")
        loop.store.close()

    return build_once("evaluated", build)


@pytest.fixture
def evaluated_loop(
    small: Any, evaluated_workspace: Path, open_loop: Callable[[Path], OpenLoop]
) -> Callable[..., OpenLoop]:
    """Opens the loop of a copy of `evaluated_workspace`; takes changes of its config."""

    def open_copy(name: str = "workspace", **changes: Any) -> OpenLoop:
        root = Path(shutil.copytree(evaluated_workspace, small.folder / name, symlinks=True))
        small.configure(root, **{"train": {"epochs": 1}, **changes})
        return open_loop(root)

    return open_copy


# Answers that end soon, as the tiny model does not end them itself.
WRITTEN: dict[str, Any] = {"labels": None, "max_new_tokens": 4}


@pytest.fixture
def written_loop(
    small: Any,
    small_anywhere: Any,
    build_once: Callable[[str, Callable[[Path], object]], Path],
    open_loop: Callable[[Path], OpenLoop],
) -> Callable[..., OpenLoop]:
    """Opens the loop of a copy of a workspace of written answers, after round 1; takes changes of its config."""

    def build(folder: Path) -> None:
        loop = OpenLoop(small_anywhere(folder.parent)(folder.name, task=WRITTEN, label={"per_round": 6}))
        loop.run(1)
        loop.store.close()

    def open_copy(name: str = "workspace", **changes: Any) -> OpenLoop:
        root = Path(shutil.copytree(build_once("written", build), small.folder / name, symlinks=True))
        small.configure(root, **{"task": WRITTEN, "label": {"per_round": 6}, **changes})
        return open_loop(root)

    return open_copy


@pytest.fixture(scope="session")
def finished_loop(finished_workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenLoop]:
    """The loop of the small workspace after two rounds; treat it as read-only."""
    root = tmp_path_factory.mktemp("finished_loop") / "workspace"
    loop = OpenLoop(Path(shutil.copytree(finished_workspace, root, symlinks=True)))
    yield loop
    loop.store.close()


@pytest.fixture(scope="session")
def loop_class() -> type[OpenLoop]:
    """For fixtures that outlive a test."""
    return OpenLoop
