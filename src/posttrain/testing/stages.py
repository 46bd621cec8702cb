"""The contract of a round's stages, as a test class to inherit from.

class TestCountLabels(StageContract):
    @pytest.fixture
    def stage(self):
        return CountLabels()
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.stage import CachedWork
from posttrain.store.workspace import Workspace


class StageContract:
    """Tests the contract of every stage; inherit and define the fixture ``stage``.

    A stage's key is made of JSON values; its work is done once and found again; the same work gives the same bytes; and
    a resumed run gives those of an uninterrupted one. Redefine the fixture ``context`` for a stage that needs results
    of earlier stages (`RoundContext.with_state`) or a config of its own.
    """

    @pytest.fixture
    def context(self, tmp_path: Path) -> Iterator[RoundContext]:
        """Rounds 1 of an empty workspace, with the default config."""
        config = Config.read({"model": "tiny", "data": {"pool": "pool.csv", "test": "test.csv"}}, "posttrain.yaml")
        with Workspace.create(tmp_path / "workspace") as workspace:
            yield RoundContext(workspace, config, 1)

    def test_key_is_made_of_json_values(self, stage: CachedWork, context: RoundContext) -> None:
        assert stage.name
        assert stage.kind
        inputs, settings = dict(stage.inputs(context)), dict(stage.settings(context))
        assert all(isinstance(value, str) for pair in inputs.items() for value in pair)
        # A value that JSON changes, such as a tuple, would give another key after it is read back from the database.
        assert json.loads(json.dumps(settings)) == settings
        assert (dict(stage.inputs(context)), dict(stage.settings(context))) == (inputs, settings)

    def test_work_is_done_once(
        self, stage: CachedWork, context: RoundContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        artifact = context.run(stage)
        assert artifact.kind == stage.kind

        def fail(*arguments: Any) -> Mapping[str, Any]:
            raise AssertionError("the work is done again")

        monkeypatch.setattr(type(stage), "run", fail)
        assert context.run(stage) == artifact

    def test_same_work_gives_the_same_bytes(self, stage: CachedWork, context: RoundContext, tmp_path: Path) -> None:
        first, second = (_run(stage, context, tmp_path / name, tmp_path / f"{name} scratch") for name in ("a", "b"))
        assert first == second

    def test_resumed_run_gives_the_same_bytes(self, stage: CachedWork, context: RoundContext, tmp_path: Path) -> None:
        # The second run meets the scratch folder that a process leaves that is killed just before its commit.
        first, resumed = (_run(stage, context, tmp_path / name, tmp_path / "scratch") for name in ("a", "b"))
        assert first == resumed


def _run(stage: CachedWork, context: RoundContext, out: Path, scratch: Path) -> tuple[Any, dict[str, bytes]]:
    """Returns the meta of a run into an empty folder, as JSON gives it back, and the files by name."""
    out.mkdir()
    scratch.mkdir(exist_ok=True)
    meta = json.loads(json.dumps(dict(stage.run(context, out, scratch))))
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return meta, files
