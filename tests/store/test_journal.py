"""The journal holds every committed change of the rows, whatever is killed."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from filled import fill_label_tables
from sqlalchemy import select, text

from posttrain.store.artifacts import Artifact, FileEntry
from posttrain.store.database import utc_now
from posttrain.store.errors import LostDatabaseError, StorageError
from posttrain.store.journal import Journal, JournalEnd, read_journal
from posttrain.store.journaled_database import JOURNALED, read_rows
from posttrain.store.label_tables import audit
from posttrain.store.metadata import Metadata
from posttrain.store.verify import verify_database


def artifact(number: int) -> Artifact:
    return Artifact(f"model-{number:016x}", "model", {"n": number}, {"a": FileEntry("0" * 64, 5)})


def change(number: int) -> list[Any]:
    return [("tags", ["name", "tag"], {"version": number})]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


class TestJournal:
    def test_entries_are_read_in_order(self, journal: Journal) -> None:
        assert (journal.last(), read_journal(journal.path).entries) == (JournalEnd(), {})
        for number in (1, 2, 3):
            journal.append(number, change(number))
            assert journal.last() == JournalEnd(number)
        assert read_journal(journal.path).rows(2) == {"tags": {("name", "tag"): {"version": 2}}}
        assert read_journal(journal.path).missing(5) == [4, 5]

    def test_an_entry_undoes_those_from_its_number_on(self, journal: Journal) -> None:
        """A transaction that did not commit leaves its entry; the next one has the same number."""
        for number in (1, 2, 3, 2):
            journal.append(number, change(number))
        content = read_journal(journal.path)
        assert sorted(content.entries) == [1, 2]
        assert content.last == 2

    def test_a_snapshot_needs_no_earlier_entries(self, journal: Journal) -> None:
        journal.append(7, change(7), snapshot=True)
        journal.append(8, [("tags", ["name", "tag"], None)])
        assert journal.last() == JournalEnd(8)
        assert read_journal(journal.path).missing(8) == []
        assert read_journal(journal.path).rows(7) == {"tags": {("name", "tag"): {"version": 7}}}
        assert read_journal(journal.path).rows(8) == {"tags": {}}

    @pytest.mark.parametrize("size", [10, 200_000])
    def test_a_torn_line_is_cut_off_by_the_next(self, journal: Journal, size: int) -> None:
        journal.append(1, change(1))
        whole = journal.path.read_bytes()
        journal.append(2, [("tags", ["x" * size, "tag"], {"version": 2})])
        torn = journal.path.read_bytes()[:-1]
        journal.path.write_bytes(torn)
        assert journal.last() == JournalEnd(1)
        assert read_journal(journal.path).damaged == []
        journal.append(2, change(2))
        assert journal.path.read_bytes().startswith(whole)
        assert read_journal(journal.path).rows(2) == {"tags": {("name", "tag"): {"version": 2}}}

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_line_without_some_of_its_sectors_is_cut_off_by_the_next(self, journal: Journal, first: int) -> None:
        """A disk may write the last sector of a line and lose an earlier one in a power cut."""
        if first:
            journal.append(1, change(1))
        start = len(journal.path.read_bytes()) if first else 0
        journal.append(first + 1, [("tags", ["name", "x" * 2000], {"version": 1})])
        raw = journal.path.read_bytes()
        for sector in range(-(-len(raw) // 512)):
            low, high = max(start, sector * 512), min((sector + 1) * 512, len(raw))
            if low >= high:
                continue
            journal.path.write_bytes(raw[:low] + bytes(high - low) + raw[high:])
            assert journal.last() == JournalEnd(1 if first else 0)
            assert (read_journal(journal.path).damaged, read_journal(journal.path).last) == ([], 1 if first else 0)
            Journal(journal.path).append(2, change(2))  # another process, as the power is back
            assert journal.path.read_bytes()[:start] == raw[:start]
            assert (read_journal(journal.path).damaged, read_journal(journal.path).last) == ([], 2)

    def test_a_changed_byte_is_detected(self, journal: Journal) -> None:
        for number in (1, 2):
            journal.append(number, change(number))
        content = bytearray(journal.path.read_bytes())
        content[-10] ^= 1
        journal.path.write_bytes(content)
        assert journal.last() is None
        assert read_journal(journal.path).damaged == [2]


class JournaledContract:
    config: ClassVar[dict[str, Any]] = {"b": [1, {"2": "ü"}], "a": None}

    @pytest.fixture
    def connect(self, url: str, journal: Journal) -> Any:
        opened = []

        def connect(**options: Any) -> Metadata:
            opened.append(Metadata(url, **{"create": True, "journal": journal, **options}))
            return opened[-1]

        yield connect
        for metadata in opened:
            metadata.close()

    def fill(self, metadata: Metadata) -> None:
        """Calls every method that writes."""
        for number in (1, 2):
            metadata.add_artifact(artifact(number))
            metadata.add_artifact(artifact(number))
        run = metadata.start_run("train", "k", round=1, seed=2, config=self.config, inputs={"x": "y"})
        metadata.seal_run(run.id, artifact(1).id, 0.1)
        with metadata.transaction():
            metadata.finish_run(run.id, artifact(1).id, detail={"tasks": {"ü": 1e-7}})
        metadata.fail_run(metadata.start_run("score", "l").id, "boom")
        metadata.wait_run(metadata.start_run("label", "m").id, "labels")
        metadata.start_run("dataset", "n")
        metadata.fail_runs([run.id for run in metadata.running()], "interrupted")
        for loop in (metadata, metadata.for_arm("random")):
            loop.open_round(0, None)
            loop.open_round(0, None)
            loop.update_round(0, status="done", decision={"action": "baseline"}, seconds=1, detail={"labels": 3})
            loop.set_hook(loop.add_deployment(artifact(1).id, round=0, action="baseline", hook="pending").id, "done")
            champion = loop.deployments()[-1]
            canary = loop.add_canary(artifact(2).id, champion=champion, share=0.1, reason="try", detail={}, hook="none")
            loop.update_canary(canary.id, status="kept", conclusion="undecided", detail={"good": 1.5})
        metadata.name_artifact("support", artifact(1).id, semantic="1.0.0", note="first")
        metadata.name_artifact("support", artifact(2).id, artifact(1).id)
        for version in (1, 2):
            metadata.tag("support", version, "production")
        metadata.forget_version("support", 1)
        metadata.forget_artifact(artifact(1).id)
        fill_label_tables(metadata)

    def test_the_journal_holds_all_rows(self, connect: Callable[..., Metadata], journal: Journal) -> None:
        metadata = connect()
        self.fill(metadata)
        with metadata.reading() as connection:
            rows = {table.name: read_rows(connection, table) for table in JOURNALED}
        assert all(rows.values())
        assert read_journal(journal.path).rows(metadata.position()) == rows
        assert verify_database(metadata, journal) == []

    def test_a_savepoint_is_undone_with_its_changes(self, connect: Callable[..., Metadata], journal: Journal) -> None:
        metadata = connect()
        with metadata.transaction():
            for number in (1, 2, 3):
                with contextlib.suppress(ZeroDivisionError), metadata.savepoint():
                    metadata.add_artifact(artifact(number))
                    _ = 1 // (number - 2)
        assert [row.id for row in metadata.artifacts()] == [artifact(1).id, artifact(3).id]
        assert verify_database(metadata, journal) == []

    def test_many_rows_are_inserted_in_their_order(self, connect: Callable[..., Metadata], journal: Journal) -> None:
        metadata = connect()
        row = {"at": utc_now(), "actor": "a", "action": "b", "before": None, "after": None}
        keys = metadata.insert_rows(audit, [{**row, "target": str(number)} for number in range(3000)])
        with metadata.reading() as connection:
            stored = connection.execute(select(audit.c.number, audit.c.target).order_by(audit.c.number)).all()
        assert [(key["number"], str(number)) for number, key in enumerate(keys)] == [tuple(row) for row in stored]
        assert metadata.position() == 1
        assert verify_database(metadata, journal) == []
        assert metadata.insert_rows(audit, []) == []

    def test_a_transaction_that_fails_leaves_no_row(
        self, connect: Callable[..., Metadata], journal: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metadata = connect()
        metadata.add_artifact(artifact(1))
        with pytest.MonkeyPatch.context() as patch:

            def full(descriptor: int) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr("os.fsync", full)
            with pytest.raises(StorageError, match="no space left"):
                metadata.add_artifact(artifact(2))
        assert [row.id for row in metadata.artifacts()] == [artifact(1).id]
        # The line is there, and the transaction is not: no damage, before and after the next one.
        assert journal.last() == JournalEnd(2)
        assert verify_database(metadata, journal) == []
        metadata.add_artifact(artifact(3))
        assert verify_database(metadata, journal) == []
        assert verify_database(connect(), journal) == []

    def test_an_older_database_is_refused(self, connect: Callable[..., Metadata], journal: Journal) -> None:
        metadata = connect()
        for number in range(4):
            metadata.add_artifact(artifact(number))
        with metadata.engine.begin() as connection:
            connection.execute(text("UPDATE journal SET number = 2"))
        for write in (True, False):
            with pytest.raises(LostDatabaseError, match=r"lacks the last 2 changes.*posttrain verify --rebuild"):
                connect(write=write)

    def test_a_lost_journal_is_written_anew(
        self, connect: Callable[..., Metadata], journal: Journal, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.fill(connect())
        journal.path.unlink()
        connect(write=False)
        assert not journal.path.exists()
        metadata = connect()
        assert "writing all rows into it" in caplog.text
        metadata.add_artifact(artifact(9))
        assert verify_database(metadata, journal) == []


class TestSQLiteJournal(JournaledContract):
    # PostgreSQL's JSON holds no NaN.
    config: ClassVar[dict[str, Any]] = {"b": [1, {"2": "ü"}], "a": float("nan")}

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"

    def test_a_lost_log_of_sqlite_is_detected(
        self, tmp_path: Path, connect: Callable[..., Metadata], journal: Journal
    ) -> None:
        """Its last commits are in `store.db-wal` alone until a checkpoint: who copies only `store.db` loses them."""
        metadata = connect()
        metadata.add_artifact(artifact(0))
        metadata.engine.dispose()
        for number in range(1, 5):
            metadata.add_artifact(artifact(number))
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("store.db", "journal.jsonl"):
            shutil.copy(tmp_path / name, copy / name)
        with pytest.raises(LostDatabaseError, match="lacks the last 4 changes"):
            Metadata(f"sqlite:///{copy}/store.db", journal=Journal(copy / "journal.jsonl"))

    def test_an_uncommitted_snapshot_is_written_again(self, connect: Callable[..., Metadata], journal: Journal) -> None:
        """A kill between the snapshot's line and its commit."""
        self.fill(metadata := connect())
        journal.path.unlink()
        journal.append(metadata.position() + 1, change(1), snapshot=True)
        metadata = connect()
        metadata.add_artifact(artifact(9))
        assert verify_database(metadata, journal) == []

    def test_lines_are_json(self, connect: Callable[..., Metadata], journal: Journal) -> None:
        self.fill(connect())
        for number, line in enumerate(journal.path.read_text(encoding="utf-8").splitlines(), 1):
            assert json.loads(line)["number"] == number


@pytest.mark.slow
class TestPostgreSQLJournal(JournaledContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url

    def test_changes_of_another_workspace_are_no_damage(
        self, tmp_path: Path, connect: Callable[..., Metadata], journal: Journal
    ) -> None:
        metadata, other = connect(), connect(journal=Journal(tmp_path / "other.jsonl"))
        for number in range(3):
            metadata.add_artifact(artifact(2 * number))
            other.add_artifact(artifact(2 * number + 1))
        assert verify_database(metadata, journal) == []
        assert verify_database(connect(), journal) == []
