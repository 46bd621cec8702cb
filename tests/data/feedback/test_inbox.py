"""An acknowledged entry is never lost or stored twice; an entry that is not acknowledged leaves no trace."""

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.feedback.entries import Feedback, Ratings, feedback_row
from posttrain.data.feedback.inbox import Conflict, Full, Inbox, Receipt, seal_inbox
from posttrain.data.feedback.segment import inbox_problems, sealed_segments
from posttrain.store.errors import UserError, WorkError
from posttrain.store.hashing import decode_line, encode_line, read_lines


def feedback(id: str, **fields: Any) -> Feedback:
    return Feedback.model_validate({"id": id, "prompt": "p", "completion": f"answer to {id}", "rating": "up", **fields})


def entries(folder: Path) -> list[str]:
    """Every id in the files of the inbox, in order."""
    paths = [*sealed_segments(folder), *sorted((folder / "segments").glob("*.open"))]
    return [value["feedback"]["id"] for path in paths for value in read_lines(path.read_bytes()).values]


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text()), min_size=1))
def test_a_line_is_json_and_decodes_to_its_value(value: dict[str, Any]) -> None:
    line = encode_line(value)
    assert line.count(b"\n") == 1
    assert decode_line(line[:-1]) == value
    assert json.loads(line).keys() == {"checksum", *value}


@pytest.mark.parametrize("value", ["\ud800", float("nan")])
def test_values_without_a_json_form_raise(value: str | float) -> None:
    with pytest.raises(ValueError, match=r"surrogates not allowed|not JSON compliant"):
        encode_line({"a": value})


def test_any_changed_byte_is_detected() -> None:
    line = encode_line({"a": "some text", "b": [1, 2]})[:-1]
    for position in range(len(line)):
        assert decode_line(line[:position] + bytes([line[position] ^ 1]) + line[position + 1 :]) is None


def test_acknowledged_entries_survive_reopening(tmp_path: Path) -> None:
    with Inbox(tmp_path) as inbox:
        for number in range(5):
            assert inbox.append(feedback(f"f{number}")).result() == Receipt(f"f{number}", repeated=False)
    with Inbox(tmp_path) as inbox:
        assert inbox.status()["entries"] == 5
        assert inbox.append(feedback("f3")).result().repeated
        with pytest.raises(Conflict, match="another feedback has the id `f3`"):
            inbox.append(feedback("f3", rating="down")).result()
    assert entries(tmp_path) == [f"f{number}" for number in range(5)]


def test_threads_share_fsyncs_and_each_id_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = []
    original_fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (syncs.append(descriptor), original_fsync(descriptor))[1])
    receipts: list[Any] = []
    with Inbox(tmp_path) as inbox:
        syncs.clear()

        def post(worker: int) -> None:
            futures = [inbox.append(feedback(f"f{number}")) for number in range(worker % 2, 200, 2)]
            receipts.extend(future.result(20) for future in futures)

        threads = [threading.Thread(target=post, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(entries(tmp_path)) == sorted(f"f{number}" for number in range(200))
    assert len(receipts) == 400
    assert sum(not receipt.repeated for receipt in receipts) == 200
    assert len(syncs) < 100


@pytest.mark.parametrize(
    "torn", [b'{"checksum":"0123', b"\x00" * 40, encode_line({"received": "", "feedback": {}})[:-1]]
)
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    with Inbox(tmp_path) as inbox:
        inbox.append(feedback("f0")).result()
    path = tmp_path / "segments" / "000001.open"
    content = path.read_bytes()
    path.write_bytes(content + torn)
    with Inbox(tmp_path) as inbox:
        assert path.read_bytes() == content
        inbox.append(feedback("f1")).result()
    assert entries(tmp_path) == ["f0", "f1"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_lines_without_some_of_their_sectors_are_removed(tmp_path: Path, lost: int) -> None:
    """Entries that share a write: the disk wrote a later one, and not the middle of an earlier one."""
    with Inbox(tmp_path) as inbox:
        inbox.append(feedback("acknowledged")).result()
    path = tmp_path / "segments" / "000001.open"
    start = path.stat().st_size
    lines = [
        encode_line({"received": "t", "feedback": feedback(f"f{number}", metadata={"x": "x" * 1500}).model_dump()})
        for number in range(3)
    ]
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"".join(lines))
        file.seek(-(-(start + sum(map(len, lines[:lost]))) // 512) * 512)
        file.write(bytes(512))
    assert list(inbox_problems(tmp_path)) == []
    with Inbox(tmp_path) as inbox:
        assert not inbox.append(feedback(f"f{lost}")).result().repeated
    assert sorted(entries(tmp_path)) == ["acknowledged", "f0", "f1", "f2"]
    assert list(inbox_problems(tmp_path)) == []


def test_complete_lines_of_a_truncated_file_survive(tmp_path: Path) -> None:
    with Inbox(tmp_path) as inbox:
        for number in range(3):
            inbox.append(feedback(f"f{number}")).result()
    path = tmp_path / "segments" / "000001.open"
    raw = path.read_bytes()
    for length in range(0, len(raw), 17):
        path.write_bytes(raw[:length])
        with Inbox(tmp_path) as inbox:
            assert inbox.status()["entries"] == raw[:length].count(b"\n")


def test_a_damaged_line_is_skipped_and_the_others_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Inbox(tmp_path) as inbox:
        for number in range(3):
            inbox.append(feedback(f"f{number}")).result()
    path = tmp_path / "segments" / "000001.open"
    path.write_bytes(path.read_bytes().replace(b"answer to f1", b"answer to f7"))
    caplog.set_level("WARNING", "posttrain")
    with Inbox(tmp_path) as inbox:
        assert inbox.status()["entries"] == 2
        inbox.append(feedback("f1")).result()
    assert "000001.open:2: does not match its checksum" in caplog.text
    assert entries(tmp_path) == ["f0", "f2", "f1"]


def refuse(code: int, times: int, function: Callable[..., Any], partly: bool = False) -> Callable[..., Any]:
    """Wraps ``function``: its first ``times`` calls fail or, with ``partly``, write only half of the data."""
    remaining = [times]

    def call(*arguments: Any) -> Any:
        if remaining[0]:
            remaining[0] -= 1
            if partly:
                descriptor, data = arguments
                return function(descriptor, data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        return function(*arguments)

    return call


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_a_full_disk_acknowledges_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with Inbox(tmp_path) as inbox:
        inbox.append(feedback("f0")).result()
        before = (tmp_path / "segments" / "000001.open").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse(errno.ENOSPC, 1, getattr(os, name)))
            with pytest.raises(Full, match="no space left on device"):
                inbox.append(feedback("f1")).result()
        assert (tmp_path / "segments" / "000001.open").read_bytes() == before
        assert not inbox.append(feedback("f1")).result().repeated  # there is space again
    assert entries(tmp_path) == ["f0", "f1"]


def test_a_partial_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Inbox(tmp_path) as inbox, monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse(0, 3, os.write, partly=True))
        inbox.append(feedback("f0")).result()
    assert entries(tmp_path) == ["f0"]


def test_a_failed_rollback_closes_the_inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Inbox(tmp_path) as inbox:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse(errno.EIO, 2, os.fsync))
            with pytest.raises(WorkError, match="Input/output error"):
                inbox.append(feedback("f0")).result()
        with pytest.raises(WorkError, match="the inbox is closed"):
            inbox.append(feedback("f1")).result()
        assert not inbox.status()["writable"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Inbox(tmp_path), pytest.raises(UserError, match="another posttrain collects into this inbox"):
        Inbox(tmp_path)
    Inbox(tmp_path).close()


def test_full_segments_are_sealed_and_never_change(tmp_path: Path) -> None:
    with Inbox(tmp_path, segment_bytes=300) as inbox:
        for number in range(12):
            inbox.append(feedback(f"f{number}")).result()
    assert len(sealed_segments(tmp_path)) >= 3
    contents = [path.read_bytes() for path in sealed_segments(tmp_path)]
    with Inbox(tmp_path) as inbox:
        assert inbox.append(feedback("f0")).result().repeated
    assert [path.read_bytes() for path in sealed_segments(tmp_path)][: len(contents)] == contents
    assert entries(tmp_path) == [f"f{number}" for number in range(12)]


def test_a_segment_that_cannot_be_sealed_keeps_growing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, Inbox(tmp_path, segment_bytes=1) as inbox:
        patch.setattr(os, "replace", refuse(errno.EIO, 10**9, os.replace))
        inbox.append(feedback("f0")).result()
        inbox.append(feedback("f1")).result()
    assert sealed_segments(tmp_path) == []
    assert "cannot be sealed: Input/output error; it keeps growing" in caplog.text
    with Inbox(tmp_path, segment_bytes=1) as inbox:
        inbox.append(feedback("f2")).result()
    assert entries(tmp_path) == ["f0", "f1", "f2"]
    assert [path.name for path in sealed_segments(tmp_path)] == ["000001.jsonl"]


@pytest.mark.parametrize("is_open", [False, True])
def test_sealing_works_with_and_without_an_open_inbox(tmp_path: Path, is_open: bool) -> None:
    inbox = Inbox(tmp_path)
    inbox.append(feedback("f0")).result()
    if not is_open:
        inbox.close()
    seal_inbox(tmp_path)
    assert [len(read_lines(path.read_bytes()).values) for path in sealed_segments(tmp_path)] == [1]
    if is_open:
        inbox.append(feedback("f1")).result()
        inbox.close()
        assert entries(tmp_path) == ["f0", "f1"]


def test_sealing_a_missing_inbox_does_nothing(tmp_path: Path) -> None:
    seal_inbox(tmp_path / "inbox")
    assert list(tmp_path.iterdir()) == []


STARS = Ratings(up_from=4, down_to=2)
PAIR = {"chosen": "right", "rejected": "said"}


@pytest.mark.parametrize(
    ("fields", "ratings", "expected"),
    [
        ({"rating": "up"}, Ratings(), ("labelled", {"completion": "said"})),
        ({"rating": 1}, Ratings(), ("labelled", {"completion": "said"})),
        ({"rating": 5}, STARS, ("labelled", {"completion": "said"})),
        ({"rating": 3}, STARS, ("pool", {})),
        ({"rating": "down"}, Ratings(), ("pool", {})),
        ({"rating": -1.0}, Ratings(), ("pool", {})),
        ({"corrected_answer": "right"}, Ratings(), ("labelled", {"completion": "right"})),
        ({"rating": "up", "corrected_answer": "right"}, Ratings(), ("labelled", {"completion": "right"})),
        (
            {"rating": 0, "corrected_answer": "right"},
            Ratings(),
            ("preferences", PAIR),
        ),
        ({"rating": 2, "corrected_answer": "right"}, STARS, ("preferences", PAIR)),
        ({"rating": "down", "corrected_answer": " said"}, Ratings(), ("labelled", {"completion": " said"})),
        (
            {"completion": "for x:\n  a\n  b", "rating": "down", "corrected_answer": "for x:\n  a\nb"},
            Ratings(),
            ("preferences", {"chosen": "for x:\n  a\nb", "rejected": "for x:\n  a\n  b"}),
        ),
        ({"completion": None, "corrected_answer": "right"}, Ratings(), ("labelled", {"completion": "right"})),
    ],
)
def test_feedback_rows(fields: dict[str, Any], ratings: Ratings, expected: tuple[str, dict[str, Any]]) -> None:
    entry = Feedback.model_validate({"id": "f", "prompt": "asked", "completion": "said", **fields})
    kind, row = feedback_row(entry.model_dump(), "then", ratings)
    meta = row.pop("meta")
    assert (kind, row) == (expected[0], {"prompt": "asked", **expected[1]})
    assert meta["feedback"]["id"] == "f"
    assert ("labelled_by" in meta) == (kind != "pool")


def test_two_open_segments_after_a_crash_are_both_read(tmp_path: Path) -> None:
    for number in (1, 2):
        with Inbox(tmp_path / str(number)) as inbox:
            inbox.append(feedback(f"f{number}")).result()
    segment = tmp_path / "2" / "segments" / "000001.open"  # as if the sealing of the first had not reached the disk
    segment.rename(tmp_path / "1" / "segments" / "000002.open")
    with Inbox(tmp_path / "1") as inbox:
        assert inbox.status()["entries"] == 2
        assert inbox.append(feedback("f2")).result().repeated
        inbox.append(feedback("f3")).result()
    seal_inbox(tmp_path / "1")
    assert [path.name for path in sealed_segments(tmp_path / "1")] == ["000001.jsonl", "000002.jsonl"]
    assert entries(tmp_path / "1") == ["f1", "f2", "f3"]
