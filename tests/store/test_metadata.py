"""The contract of the metadata, for SQLite and for a real PostgreSQL."""

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


def add_finished_run(metadata: Metadata, output: Artifact, inputs: dict[str, str], stage: str = "stage") -> Run:
    run = metadata.start_run(stage, f"key of {output.id}", inputs=inputs)
    metadata.add_artifact(output)
    return metadata.finish_run(run.id, output.id)


class MetadataContract:
    """A database implements `url`; every test has an empty one."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    def test_every_arm_keeps_its_own_rounds(self, metadata: Metadata) -> None:
        random_arm = metadata.for_arm("random")
        model = artifact(1, "model")
        main_run = add_finished_run(metadata, model, {})
        for item, champion in ((metadata, "model-a"), (random_arm, "model-b")):
            item.open_round(0, champion)
            item.add_deployment(champion, round=0, action="baseline")
        arm_run = random_arm.start_run("train", "another key", round=0)
        random_arm.update_round(0, status="done", detail={"labels": 3})
        assert [round.champion_before for round in metadata.rounds()] == ["model-a"]
        assert [round.champion_before for round in random_arm.rounds()] == ["model-b"]
        assert [round.status for round in (*metadata.rounds(), *random_arm.rounds())] == ["open", "done"]
        assert [item.model_id for item in metadata.deployments()] == ["model-a"]
        assert [item.model_id for item in random_arm.deployments()] == ["model-b"]
        assert [run.id for run in metadata.runs()] == [main_run.id]
        assert [run.id for run in random_arm.runs()] == [arm_run.id]
        result = random_arm.finished_run(main_run.key)
        assert result is not None
        assert result.output == model.id, "finished work is shared"

    def test_a_run_from_start_to_end(self, metadata: Metadata, connect: Callable[..., Metadata]) -> None:
        start = datetime.now(UTC)
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
        assert start <= run.started_at <= datetime.now(UTC)
        assert metadata.finished_run("k" * 64) is None

        metadata.add_artifact(artifact(1))
        finished_run = metadata.finish_run(run.id, artifact(1).id, {"steps": 7}, seconds=1.5)
        assert (finished_run.status, finished_run.output, finished_run.detail, finished_run.seconds) == (
            "done",
            artifact(1).id,
            {"steps": 7},
            1.5,
        )
        assert finished_run.finished_at is not None
        assert finished_run.finished_at >= finished_run.started_at
        assert connect().finished_run("k" * 64) == metadata.run(run.id) == finished_run

    def test_runs_end_failed_waiting_or_done(self, metadata: Metadata) -> None:
        failed_run, waiting_run, running_run = (metadata.start_run("s", "key") for _ in range(3))
        assert metadata.fail_run(failed_run.id, "boom\x00").error == "boom"
        assert metadata.wait_run(waiting_run.id, "labels").status == "waiting"
        assert [run.id for run in metadata.running()] == [run.id for run in metadata.running("key")] == [running_run.id]
        assert metadata.running("other") == []
        assert metadata.fail_runs([failed_run.id, running_run.id], "interrupted") == 1
        run = metadata.run(running_run.id)
        assert run is not None
        assert (run.status, run.error) == ("failed", "interrupted")
        assert metadata.finished_run("key") is None
        assert metadata.finish_run(failed_run.id).error is None
        for change in (metadata.finish_run, lambda id: metadata.fail_run(id, "x")):
            with pytest.raises(LookupError, match="run-none"):
                change("run-none")
        assert metadata.run("run-none") is None

    def test_runs_are_filtered_by_round_stage_and_status(self, metadata: Metadata) -> None:
        runs = [metadata.start_run(stage, "k", round=number) for number in (0, 1) for stage in ("score", "train")]
        metadata.finish_run(runs[3].id)
        assert [run.id for run in metadata.runs()] == [run.id for run in runs]
        assert [run.id for run in metadata.runs(round=0)] == [runs[0].id, runs[1].id]
        assert [run.id for run in metadata.runs(stage="train")] == [runs[1].id, runs[3].id]
        assert [run.id for run in metadata.runs(round=1, stage="train", status="done")] == [runs[3].id]
        assert metadata.runs(round=7) == []

    def test_order_does_not_follow_the_clock(self, metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
        times = iter(datetime(2030 - year, 1, 1, tzinfo=UTC) for year in range(30))
        for module in ("metadata", "rounds"):
            monkeypatch.setattr(f"posttrain.store.{module}.utc_now", lambda: next(times))
        runs = [add_finished_run(metadata, artifact(number), {}).id for number in (5, 3, 4)]
        assert [run.id for run in metadata.runs()] == runs
        repeat = metadata.start_run("stage", f"key of {artifact(5).id}")
        metadata.finish_run(repeat.id, artifact(5).id)
        assert metadata.finished_run(repeat.key) == metadata.run(repeat.id)
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
        for prefix in ("dataset-ab", "abc", "ab"):
            with pytest.raises(UserError, match="could be dataset-abc"):
                metadata.resolve(prefix)
        for unknown_name in (
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
                metadata.resolve(unknown_name)

    def test_lineage(self, metadata: Metadata) -> None:
        """pool → labels → train; pool → train; train → model; model → next model, which also uses the pool."""
        pool, labels, train, model, next_model = (artifact(number) for number in range(5))
        add_finished_run(metadata, pool, {"file": "a digest of a file"})
        add_finished_run(metadata, labels, {"pool": pool.id})
        add_finished_run(metadata, train, {"pool": pool.id, "labels": labels.id})
        runs = add_finished_run(metadata, model, {"train": train.id})
        add_finished_run(metadata, next_model, {"start": model.id, "pool": pool.id})
        running_run = metadata.start_run("s", "k", inputs={"pool": pool.id})

        assert [run.output for run in metadata.consumers(pool.id)] == [
            labels.id,
            train.id,
            next_model.id,
            None,
        ]
        assert metadata.consumers(pool.id)[-1].id == running_run.id
        assert metadata.producers(model.id) == [runs]
        assert metadata.producers("dataset-9") == []

        result = [(item.depth, item.artifact.id) for item in ancestors(metadata, model.id)]
        assert result == [(0, model.id), (1, train.id), (2, labels.id), (2, pool.id)]
        result = [(item.depth, item.artifact.id) for item in descendants(metadata, pool.id)]
        assert result == [(0, pool.id), (1, labels.id), (1, train.id), (1, next_model.id), (2, model.id)]
        assert ancestors(metadata, model.id)[0].run == runs
        assert ancestors(metadata, "dataset-9") == []

    def test_lineage_of_a_stage_whose_output_is_its_input(self, metadata: Metadata) -> None:
        add_finished_run(metadata, artifact(1), {"itself": artifact(1).id})
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

    def test_concurrent_names_get_distinct_versions(self, connect: Callable[..., Metadata]) -> None:
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

    def test_an_artifact_can_be_added_concurrently(self, connect: Callable[..., Metadata]) -> None:
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
