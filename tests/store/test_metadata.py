"""The contract of the metadata, kept by SQLite and by a real PostgreSQL."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError

from posttrain import __version__
from posttrain.inspect.show import ancestors, descendants
from posttrain.store.artifacts import Artifact, FileEntry
from posttrain.store.errors import UserError
from posttrain.store.metadata import Metadata
from posttrain.store.rows import Run

pytestmark = pytest.mark.slow


def artifact(number: int, kind: str = "dataset") -> Artifact:
    return Artifact(f"{kind}-{number:016x}", kind, {"n": number}, {"a": FileEntry("0" * 64, 5 * 2**30)})


def finished(metadata: Metadata, output: Artifact, inputs: dict[str, str], stage: str = "stage") -> Run:
    run = metadata.start_run(stage, f"key of {output.id}", inputs=inputs)
    metadata.add_artifact(output)
    return metadata.finish_run(run.id, output.id)


class MetadataContract:
    """A database implements `url`; every test has an empty one."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    def test_a_loop_beside_keeps_its_own_rounds(self, metadata: Metadata) -> None:
        beside = metadata.for_arm("random")
        model = artifact(1, "model")
        ours = finished(metadata, model, {})
        for item, champion in ((metadata, "model-a"), (beside, "model-b")):
            item.open_round(0, champion)
            item.add_deployment(champion, round=0, action="baseline")
        theirs = beside.start_run("train", "another key", round=0)
        beside.update_round(0, status="done", detail={"labels": 3})
        assert [round.champion_before for round in metadata.rounds()] == ["model-a"]
        assert [round.champion_before for round in beside.rounds()] == ["model-b"]
        assert [round.status for round in (*metadata.rounds(), *beside.rounds())] == ["open", "done"]
        assert [item.model_id for item in metadata.deployments()] == ["model-a"]
        assert [item.model_id for item in beside.deployments()] == ["model-b"]
        assert [run.id for run in metadata.runs()] == [ours.id]
        assert [run.id for run in beside.runs()] == [theirs.id]
        result = beside.finished_run(ours.key)
        assert result is not None
        assert result.output == model.id, "finished work is shared"

    def test_a_run_from_start_to_end(self, metadata: Metadata, connect: Callable[..., Metadata]) -> None:
        before = datetime.now(UTC)
        config = {"lr": 1e-4, "text": "é\u2028", "none": None, "nested": {"list": [1, "2"]}}
        run = metadata.start_run(
            "train", "k" * 64, round=3, seed=2**62, config=config, inputs={"b": "dataset-1", "a": "x"}
        )
        assert (run.stage, run.key, run.round, run.seed) == ("train", "k" * 64, 3, 2**62)
        assert (run.status, run.output, run.finished_at, run.error) == ("running", None, None, None)
        assert (run.config, run.inputs) == (config, {"a": "x", "b": "dataset-1"})
        assert run.code_version == __version__
        assert {"python", "packages", "platform", "processors", "host"} <= run.environment.keys()
        assert run.started_at.utcoffset() == timedelta(0)
        assert before <= run.started_at <= datetime.now(UTC)
        assert metadata.finished_run("k" * 64) is None

        metadata.add_artifact(artifact(1))
        done = metadata.finish_run(run.id, artifact(1).id, {"steps": 7}, seconds=1.5)
        assert (done.status, done.output, done.detail, done.seconds) == (
            "done",
            artifact(1).id,
            {"steps": 7},
            1.5,
        )
        assert done.finished_at is not None
        assert done.finished_at >= done.started_at
        assert connect().finished_run("k" * 64) == metadata.run(run.id) == done

    def test_how_runs_end(self, metadata: Metadata) -> None:
        failed, waiting, running = (metadata.start_run("s", "key") for _ in range(3))
        assert metadata.fail_run(failed.id, "boom\x00").error == "boom"
        assert metadata.wait_run(waiting.id, "labels").status == "waiting"
        assert metadata.fail_interrupted() == 1
        run = metadata.run(running.id)
        assert run is not None
        assert (run.status, run.error) == ("failed", "interrupted")
        assert metadata.finished_run("key") is None
        assert metadata.finish_run(failed.id).error is None
        for change in (metadata.finish_run, lambda id: metadata.fail_run(id, "x")):
            with pytest.raises(LookupError, match="run-none"):
                change("run-none")
        assert metadata.run("run-none") is None

    def test_runs_by_what_they_are(self, metadata: Metadata) -> None:
        runs = [metadata.start_run(stage, "k", round=number) for number in (0, 1) for stage in ("score", "train")]
        metadata.finish_run(runs[3].id)
        assert [run.id for run in metadata.runs()] == [run.id for run in runs]
        assert [run.id for run in metadata.runs(round=0)] == [runs[0].id, runs[1].id]
        assert [run.id for run in metadata.runs(stage="train")] == [runs[1].id, runs[3].id]
        assert [run.id for run in metadata.runs(round=1, stage="train", status="done")] == [runs[3].id]
        assert metadata.runs(round=7) == []

    def test_order_does_not_follow_the_clock(self, metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
        times = iter(datetime(2030 - year, 1, 1, tzinfo=UTC) for year in range(30))
        for module in ("metadata", "names"):
            monkeypatch.setattr(f"posttrain.store.{module}.utc_now", lambda: next(times))
        runs = [finished(metadata, artifact(number), {}).id for number in (5, 3, 4)]
        assert [run.id for run in metadata.runs()] == runs
        again = metadata.start_run("stage", f"key of {artifact(5).id}")
        metadata.finish_run(again.id, artifact(5).id)
        assert metadata.finished_run(again.key) == metadata.run(again.id)
        models = [metadata.add_deployment(f"m{n}", round=n, action="promote").model_id for n in range(3)]
        assert [deployment.model_id for deployment in metadata.deployments()] == models

    def test_many_runs_with_inputs(self, metadata: Metadata) -> None:
        for number in range(130):
            metadata.start_run("s", "k", inputs={"n": str(number), "m": "x"})
        assert [run.inputs["n"] for run in metadata.runs()] == [str(number) for number in range(130)]
        assert len(metadata.consumers("x")) == 130

    def test_artifacts(self, metadata: Metadata) -> None:
        for item in (artifact(2), artifact(1), artifact(1, "model"), artifact(1)):
            metadata.add_artifact(item)
        assert [row.id for row in metadata.artifacts()] == [
            artifact(1).id,
            artifact(2).id,
            artifact(1, "model").id,
        ]
        assert [row.id for row in metadata.artifacts("model")] == [artifact(1, "model").id]
        row = metadata.artifact(artifact(2).id)
        assert row is not None
        assert (row.kind, row.meta, row.size, row.files) == ("dataset", {"n": 2}, 5 * 2**30, 1)
        assert metadata.artifact("dataset-9") is None

    def test_resolve(self, metadata: Metadata) -> None:
        for number in (0xABC << 52, 0xABD << 52):
            metadata.add_artifact(artifact(number))
        metadata.add_artifact(artifact(0xABC << 52, "model"))
        run = metadata.start_run("s", "k")
        metadata.name_artifact("sup_port", artifact(0xABD << 52).id)
        model = artifact(0xABC << 52, "model").id
        assert metadata.resolve(model) == metadata.resolve("mod") == metadata.resolve("model-abc") == model
        assert metadata.resolve("abd") == metadata.resolve("sup_port@v1") == artifact(0xABD << 52).id
        assert metadata.resolve(run.id[:9]) == metadata.resolve(run.id[4:]) == run.id
        for many in ("dataset-ab", "abc", "ab"):
            with pytest.raises(UserError, match="could be dataset-abc"):
                metadata.resolve(many)
        for none in (
            "",
            "nothing",
            "%",
            "_",
            "MODEL",
            "sup_port@v2",
            "sup%port@v1",
            "sup_port@v",
            "x@v99999999999999",
        ):
            with pytest.raises(UserError, match="nothing here"):
                metadata.resolve(none)

    def test_lineage(self, metadata: Metadata) -> None:
        """pool → labels → train; pool → train; train → model; model → next model, which the pool made too."""
        pool, labels, train, model, following = (artifact(number) for number in range(5))
        finished(metadata, pool, {"file": "a digest of a file"})
        finished(metadata, labels, {"pool": pool.id})
        finished(metadata, train, {"pool": pool.id, "labels": labels.id})
        runs = finished(metadata, model, {"train": train.id})
        finished(metadata, following, {"start": model.id, "pool": pool.id})
        unfinished = metadata.start_run("s", "k", inputs={"pool": pool.id})

        assert [run.output for run in metadata.consumers(pool.id)] == [
            labels.id,
            train.id,
            following.id,
            None,
        ]
        assert metadata.consumers(pool.id)[-1].id == unfinished.id
        assert metadata.producers(model.id) == [runs]
        assert metadata.producers("dataset-9") == []

        result = [(item.depth, item.artifact.id) for item in ancestors(metadata, model.id)]
        assert result == [(0, model.id), (1, train.id), (2, labels.id), (2, pool.id)]
        result = [(item.depth, item.artifact.id) for item in descendants(metadata, pool.id)]
        assert result == [(0, pool.id), (1, labels.id), (1, train.id), (1, following.id), (2, model.id)]
        assert ancestors(metadata, model.id)[0].run == runs
        assert ancestors(metadata, "dataset-9") == []

    def test_lineage_of_a_stage_that_changed_nothing(self, metadata: Metadata) -> None:
        finished(metadata, artifact(1), {"itself": artifact(1).id})
        assert [item.depth for item in ancestors(metadata, artifact(1).id)] == [0]
        assert [item.depth for item in descendants(metadata, artifact(1).id)] == [0]

    def test_rounds(self, metadata: Metadata) -> None:
        first = metadata.open_round(0, None)
        assert (first.status, first.decision, first.detail, first.finished_at) == ("open", None, {}, None)
        assert metadata.update_round(0, status="waiting", detail={"labels": 5}).detail == {"labels": 5}
        done = metadata.update_round(0, status="done", candidate="m", decision={"deploy": True}, seconds=2.5)
        assert (done.candidate, done.decision, done.seconds) == ("m", {"deploy": True}, 2.5)
        assert done.finished_at is not None
        assert metadata.open_round(0, "other") == done  # history stays
        second = metadata.open_round(1, "m")
        assert metadata.rounds() == [done, second]
        assert metadata.round(1) == second
        assert metadata.round(2) is None
        with pytest.raises(LookupError, match="no round 9"):
            metadata.update_round(9, status="done")
        with pytest.raises(TypeError, match="winner"):
            metadata.update_round(1, winner="m")
        with pytest.raises(IntegrityError):
            metadata.update_round(1, status="odd")
        assert metadata.rounds() == [done, second]

    def test_deployments(self, metadata: Metadata) -> None:
        first = metadata.add_deployment("m0", round=0, action="baseline")
        second = metadata.add_deployment("m1", round=None, action="rollback", reason="worse", hook="pending")
        assert (first.reason, first.hook, second.round) == ("", "none", None)
        metadata.set_hook(second.id, "failed")
        assert [(item.model_id, item.hook) for item in metadata.deployments()] == [
            ("m0", "none"),
            ("m1", "failed"),
        ]
        with pytest.raises(LookupError):
            metadata.set_hook(99, "done")
        with pytest.raises(IntegrityError):
            metadata.add_deployment("m2", round=1, action="throw")

    def test_names(self, metadata: Metadata) -> None:
        for number in (1, 2, 3):
            metadata.add_artifact(artifact(number))
        assert metadata.name_artifact("pool", artifact(1).id) == 1
        assert metadata.name_artifact("pool", artifact(2).id, artifact(1).id) == 2
        assert metadata.name_artifact("pool", artifact(1).id) == 1
        assert metadata.name_artifact("test", artifact(2).id) == 1
        assert metadata.named("pool") == metadata.named("pool", 2) == artifact(2).id
        assert metadata.named("pool", 1) == artifact(1).id
        assert metadata.named("pool", 3) is metadata.named("none") is None
        rows = [(row.name, row.version, row.artifact_id, row.parent) for row in metadata.names()]
        assert rows[1:] == [("pool", 2, artifact(2).id, artifact(1).id), ("test", 1, artifact(2).id, None)]
        assert len(metadata.names("pool")) == 2
        for id, parent in (("dataset-9", None), (artifact(3).id, "dataset-9")):
            with pytest.raises(LookupError, match="dataset-9"):
                metadata.name_artifact("pool", id, parent)

    def test_many_name_at_once(self, connect: Callable[..., Metadata]) -> None:
        count = 6
        databases = [connect() for _ in range(count)]
        for number in range(count):
            databases[0].add_artifact(artifact(number))
        gate = threading.Barrier(count)

        def name(number: int) -> int:
            gate.wait()
            return databases[number].name_artifact("pool", artifact(number).id)

        with ThreadPoolExecutor(count) as threads:
            assert sorted(threads.map(name, range(count))) == list(range(1, count + 1))

    def test_many_add_the_same_artifact_at_once(self, connect: Callable[..., Metadata]) -> None:
        databases = [connect() for _ in range(4)]
        gate = threading.Barrier(4)

        def add(metadata: Metadata) -> None:
            gate.wait()
            for number in range(5):
                metadata.add_artifact(artifact(number))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(add, databases))
        assert len(databases[0].artifacts()) == 5


class TestSQLite(MetadataContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"


class TestPostgreSQL(MetadataContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url
