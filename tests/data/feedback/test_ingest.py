"""Feedback becomes records of every kind, once."""

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from posttrain.data.feedback.entries import Feedback, Ratings, feedback_row
from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.ingest import FeedbackBatch, ingest
from posttrain.data.feedback.segment import sealed_segments
from posttrain.data.records.record import concat
from posttrain.store.hashing import encode_line

ENTRIES: list[dict[str, Any]] = [
    {"id": "a", "prompt": "one", "completion": "1", "rating": "up", "metadata": {"model": "m", "id": "not ours"}},
    {"id": "b", "prompt": "two", "completion": "1", "rating": "down", "corrected_answer": "2"},
    {"id": "c", "prompt": [{"role": "user", "content": "three"}], "completion": "x", "rating": "down"},
    {"id": "d", "prompt": "four", "completion": "x", "corrected_answer": "4"},
]


def post(folder: Path, *entries: dict[str, Any]) -> None:
    with Inbox(folder) as inbox:
        for fields in entries:
            inbox.append(Feedback.model_validate(fields)).result()


def rows(batch: FeedbackBatch, kind: Any) -> list[dict[str, Any]]:
    return list(concat(list(batch.tables(kind))).to_pylist())


def test_records_of_every_kind(tmp_path: Path) -> None:
    post(tmp_path, *ENTRIES)
    [batch] = ingest(tmp_path)
    assert batch.counts == {"labelled": 2, "preferences": 1, "pool": 1, "damaged": 0}
    up, correction = rows(batch, "labelled")
    assert (up["prompt"], up["completion"]) == ([{"role": "user", "content": "one"}], "1")
    assert up["source"] == "inbox/feedback-000001-labelled.jsonl"
    assert correction["completion"] == "4"
    [pair] = rows(batch, "preferences")
    assert (pair["completion"], pair["rejected"]) == ("2", "1")
    [unlabelled] = rows(batch, "pool")
    assert (unlabelled["prompt"][0]["content"], unlabelled["completion"]) == ("three", None)


def test_meta_holds_the_feedback(tmp_path: Path) -> None:
    post(tmp_path, *ENTRIES)
    [batch] = ingest(tmp_path)
    up, unlabelled = (json.loads(rows(batch, kind)[0]["meta"]) for kind in ("labelled", "pool"))
    assert up.pop("labelled_by") == "feedback"
    assert up["feedback"].pop("received").startswith("20")
    assert up["feedback"] == {"id": "a", "rating": "up", "metadata": {"model": "m", "id": "not ours"}}
    assert unlabelled["feedback"]["completion"] == "x"


def test_every_entry_is_ingested_exactly_once(tmp_path: Path) -> None:
    post(tmp_path, *ENTRIES[:2])
    [first] = ingest(tmp_path)
    contents = {kind: path.read_bytes() for kind, path in first.files.items()}
    [retry] = ingest(tmp_path)  # as after a crash before `done`
    assert {kind: path.read_bytes() for kind, path in retry.files.items()} == contents
    assert retry.files == first.files
    retry.done()
    assert ingest(tmp_path) == []
    post(tmp_path, *ENTRIES)  # the first two are ingested already
    [second] = ingest(tmp_path)
    assert second.number == 2
    assert second.counts == {"labelled": 1, "pool": 1, "damaged": 0}


def test_an_empty_inbox_gives_no_batch(tmp_path: Path) -> None:
    assert ingest(tmp_path / "inbox") == []


def test_damaged_lines_and_neutral_ratings_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        "posttrain.data.feedback.ingest.log.warning", lambda line, *values: warnings.append(line % values)
    )
    post(tmp_path, {**ENTRIES[0], "rating": 3}, {**ENTRIES[0], "id": "z"})
    ingest(tmp_path)
    [segment] = sealed_segments(tmp_path)
    segment.write_bytes(segment.read_bytes().replace(b'"id":"z"', b'"id":"y"'))
    [batch] = ingest(tmp_path, Ratings(up_from=5, down_to=1))
    assert batch.counts == {"pool": 1, "damaged": 1}
    assert f"{segment}:2: does not match its checksum; skipping the line" in warnings
    assert any("1 ratings are neither up nor down (up from 5, down to 1)" in line for line in warnings)


def test_lines_that_are_no_feedback_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    post(tmp_path, ENTRIES[0])
    stamp = "2026-01-01T00:00:00.000+00:00"
    hostile: list[dict[str, Any]] = [
        {"received": stamp, "feedback": {**ENTRIES[1], "rating": 10**3999}},
        {"received": stamp, "feedback": {**ENTRIES[1], "rating": "sideways"}},
        {"received": stamp, "feedback": {"id": "x"}},
        {"received": stamp, "feedback": [1]},
        {"received": None, "feedback": ENTRIES[1]},
        {"other": 1},
    ]
    lines = [encode_line(value) for value in hostile]
    rests = [b'"received":"","feedback":' + b"[" * 100_000 + b"}", b'"feedback":{"id":"\xff"}}', b"no JSON"]
    rests += [b'"received":"","feedback":{"id":"\\ud800","prompt":"p","completion":"c","rating":"up"}}']
    rests += [b'"received":"","feedback":{"id":"m","prompt":"p","completion":"c","rating":1,"metadata":{"n":1e999}}}']
    lines += [b'{"checksum":"%s",%s\n' % (xxhash.xxh3_64_hexdigest(rest).encode(), rest) for rest in rests]
    path = tmp_path / "segments" / "000001.open"
    path.write_bytes(path.read_bytes() + b"".join(lines))
    caplog.set_level("WARNING", "posttrain")
    post(tmp_path, ENTRIES[2])
    [batch] = ingest(tmp_path)
    assert batch.counts == {"labelled": 1, "pool": 1, "damaged": 3, "invalid": 8}
    rejected = [json.loads(line) for line in batch.rejected("invalid").read_text().splitlines()]
    assert [entry["line"] for entry in rejected] == [2, 3, 4, 5, 6, 7, 11, 12]
    assert "`rating`: must be at most 1,000,000" in rejected[0]["reason"]
    assert rejected[0]["entry"].encode() + b"\n" == lines[0]
    assert "8 lines are not feedback and are set aside in" in caplog.text
    assert "000001.open:2: is not feedback (feedback: `rating`" in caplog.text


def test_a_rating_at_a_limit_is_on_its_side() -> None:
    stars = Ratings(up_from=4, down_to=2)
    assert [stars.of(rating) for rating in (1, 2, 2.5, 3.9, 4, 5)] == ["down", "down", None, None, "up", "up"]
    assert [Ratings().of(rating) for rating in (-1, 0, 0.5, 1, "up", "down", None)] == [
        *("down", "down", None, "up"),
        *("up", "down", None),
    ]


def test_a_correction_that_repeats_the_refused_answer_is_no_pair() -> None:
    feedback = {"id": "a", "prompt": "q", "completion": "cash ", "rating": "down"}
    kinds = [
        feedback_row({**feedback, "corrected_answer": answer}, "2026-01-01T00:00:00Z", Ratings())[0]
        for answer in ("card", "cash")
    ]
    assert kinds == ["preferences", "labelled"]
