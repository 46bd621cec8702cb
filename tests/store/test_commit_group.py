"""Writes that share a commit: each gets its own result or error, and none is lost or done twice."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.commit_group import CommitGroup, _Write
from posttrain.store.database import utc_now
from posttrain.store.errors import StorageError, UserError
from posttrain.store.journal import Journal
from posttrain.store.label_tables import guidelines
from posttrain.store.metadata import Metadata
from posttrain.store.verify import verify_database

Run = Callable[[list[Callable[[], Any]]], list[Any]]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


@pytest.fixture
def metadata(tmp_path: Path, journal: Journal) -> Any:
    metadata = Metadata(f"sqlite:///{tmp_path}/store.db", create=True, journal=journal)
    yield metadata
    assert verify_database(metadata, journal) == []
    metadata.close()


@pytest.fixture
def run_together(metadata: Metadata) -> Run:
    """Runs functions in threads so that all but the first wait for it, and are committed together."""
    group = CommitGroup(metadata)

    def run(functions: list[Callable[[], Any]]) -> list[Any]:
        outcomes: list[Any] = [None] * len(functions)
        entered, leave = threading.Event(), threading.Event()

        def first() -> None:
            entered.set()
            assert leave.wait(10)

        def call(row: int) -> None:
            try:
                outcomes[row] = group.run(functions[row], order=row)
            except Exception as error:  # noqa: BLE001 - the outcome
                outcomes[row] = error

        threads = [threading.Thread(target=call, args=(row,)) for row in range(len(functions))]
        holder = threading.Thread(target=group.run, args=(first,))
        holder.start()
        assert entered.wait(10)
        for thread in threads:
            thread.start()
        while len(group._waiting) < len(functions):
            threading.Event().wait(0.001)
        leave.set()
        for thread in [holder, *threads]:
            thread.join(10)
        return outcomes

    return run


def adding(metadata: Metadata, version: int) -> Callable[[], int]:
    def add() -> int:
        row = {"version": version, "text": "#", "author": "a", "created_at": utc_now()}
        metadata.insert_row(guidelines, row)
        return version

    return add


def versions(metadata: Metadata) -> list[int]:
    with metadata.reading() as connection:
        return sorted(connection.scalars(guidelines.select().with_only_columns(guidelines.c.version)))


def test_writes_that_wait_share_a_transaction(metadata: Metadata, run_together: Run) -> None:
    assert run_together([adding(metadata, number) for number in range(5)]) == list(range(5))
    assert metadata.position() == 1
    assert versions(metadata) == list(range(5))


def test_writes_lock_rows_in_one_order(metadata: Metadata) -> None:
    """Two groups that lock the same rows in other orders would wait for each other."""
    group, order = CommitGroup(metadata), [3, 1, 2]
    ran: list[int] = []
    group._waiting = [_Write(lambda number=number: ran.append(number), number) for number in order]  # type: ignore[misc]
    group._commit()
    assert ran == sorted(order)


def test_a_refused_write_costs_the_others_nothing(metadata: Metadata, run_together: Run) -> None:
    def refuse() -> None:
        raise UserError("no")

    outcomes = run_together([adding(metadata, 0), refuse, adding(metadata, 2)])
    assert (outcomes[0], str(outcomes[1]), outcomes[2]) == (0, "no", 2)
    assert metadata.position() == 1


@pytest.mark.parametrize("error", [UserError("late"), ValueError("bug"), StorageError("full")])
def test_a_write_that_fails_half_way_leaves_no_trace(metadata: Metadata, run_together: Run, error: Exception) -> None:
    def fail() -> None:
        adding(metadata, 1)()
        raise error

    outcomes = run_together([adding(metadata, 0), fail, adding(metadata, 2)])
    assert outcomes == [0, error, 2]
    assert versions(metadata) == [0, 2]


def test_a_constraint_that_two_writes_break_stops_one(metadata: Metadata, run_together: Run) -> None:
    outcomes = run_together([adding(metadata, 7), adding(metadata, 7), adding(metadata, 8)])
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["IntegrityError", "int", "int"]
    assert versions(metadata) == [7, 8]


def test_a_failed_commit_is_the_error_of_all(
    metadata: Metadata, run_together: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(Journal, "append", full)
    outcomes = run_together([adding(metadata, 0), adding(metadata, 1)])
    assert [str(outcome) for outcome in outcomes] == ["no space left", "no space left"]
    monkeypatch.undo()
    assert versions(metadata) == []


def test_inside_a_transaction_it_joins_it(metadata: Metadata) -> None:
    group = CommitGroup(metadata)

    def fail() -> None:
        with metadata.transaction():
            group.run(adding(metadata, 0))
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert versions(metadata) == []
