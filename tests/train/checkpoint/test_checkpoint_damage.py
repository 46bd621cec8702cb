"""Damage of any kind is detected and named, and an earlier checkpoint is used instead."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.store.errors import UserError, WorkError
from posttrain.train.checkpoint import writer
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.format import MANIFEST, STATE, STEPS, TENSORS, Checkpoint, DamagedCheckpoint
from posttrain.train.checkpoint.reader import read_checkpoint

Make = Callable[..., Checkpoint]
Same = Callable[[Checkpoint | None, Checkpoint], bool]

FILES = [TENSORS, STATE, STEPS, MANIFEST]
NEWEST = "step-000000004"


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    match how:
        case "first byte":
            file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "middle byte":
            middle = len(content) // 2
            file.write_bytes(content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :])
        case "last byte":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 0x80]))
        case "half":
            file.write_bytes(content[: len(content) // 2])
        case "one byte short":
            file.write_bytes(content[:-1])
        case "empty":
            file.write_bytes(b"")
        case "longer":
            file.write_bytes(content + b"\0")
        case "zeros":
            file.write_bytes(b"\0" * len(content))
        case "missing":
            file.unlink()
        case "a folder":
            file.unlink()
            file.mkdir()


HOWS = [
    "first byte",
    "middle byte",
    "last byte",
    "half",
    "one byte short",
    "empty",
    "longer",
    "zeros",
    "missing",
    "a folder",
]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how) for name in FILES for how in HOWS if (name, how) != (STEPS, "longer")
    ],  # another checkpoint that shares the file makes it longer
)
def test_a_damaged_checkpoint_is_named_and_skipped(
    two_checkpoints: Checkpoints, make: Make, same: Same, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    damage(two_checkpoints.folder / NEWEST / name, how)
    assert same(two_checkpoints.latest(), make(3))
    message, fallback_message = caplog.messages
    assert f"{NEWEST} is damaged (" in message
    assert name in message
    assert "put aside as damaged-000000004" in message
    assert "\n" not in message
    assert fallback_message == "using the checkpoint of step 3 instead"
    assert two_checkpoints.steps() == [3]
    # A damaged checkpoint does not count when old ones are pruned.
    two_checkpoints.save(5, make(5))
    damage(two_checkpoints.folder / "step-000000005" / name, how)
    assert same(two_checkpoints.latest(), make(3))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_a_flipped_bit_is_detected(two_checkpoints: Checkpoints, make: Make, same: Same, name: str) -> None:
    folder = two_checkpoints.folder / NEWEST
    file = folder / name
    content = file.read_bytes()
    for position in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint, match=name):
            read_checkpoint(folder, 4)
    file.write_bytes(content)
    assert same(read_checkpoint(folder, 4), make(4))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_any_file_is_detected(two_checkpoints: Checkpoints, data: st.DataObject) -> None:
    file = two_checkpoints.folder / NEWEST / data.draw(st.sampled_from(FILES))
    content = file.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    changed = content[:start] + data.draw(st.binary(max_size=8)) + content[end:]
    file.write_bytes(changed)
    try:
        if changed == content or (file.name == STEPS and changed.startswith(content)):
            read_checkpoint(file.parent, 4)
        else:
            with pytest.raises(DamagedCheckpoint):
                read_checkpoint(file.parent, 4)
    finally:
        file.write_bytes(content)


def test_the_damaged_tensor_is_named(
    two_checkpoints: Checkpoints, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    file = two_checkpoints.folder / NEWEST / TENSORS
    entries = json.loads((two_checkpoints.folder / NEWEST / MANIFEST).read_bytes())["tensors"]
    content = file.read_bytes()
    for name, entry in entries.items():
        for position in (entry["start"], entry["start"] + entry["size"] - 1):
            flipped = bytearray(content)
            flipped[position] ^= 4
            file.write_bytes(flipped)
            with pytest.raises(DamagedCheckpoint) as caught:
                read_checkpoint(file.parent, 4)
            assert str(caught.value) == f"{TENSORS} does not match its checksums in `{name}`"
    file.write_bytes(content[:-1])
    last = max(entries, key=lambda name: entries[name]["start"])
    assert two_checkpoints.at(4) is None
    assert f"has {len(content) - 1} bytes instead of {len(content)}: `{last}` cut off" in caplog.text


def test_many_damaged_tensors_are_named_in_one_line(two_checkpoints: Checkpoints) -> None:
    file = two_checkpoints.folder / NEWEST / TENSORS
    entries = json.loads((two_checkpoints.folder / NEWEST / MANIFEST).read_bytes())["tensors"]
    start = min(entry["start"] for entry in entries.values())
    file.write_bytes(file.read_bytes()[:start] + bytes(255 - byte for byte in file.read_bytes()[start:]))
    with pytest.raises(DamagedCheckpoint, match=r"in `master.w`, `half`, `step` and 2 more$"):
        read_checkpoint(file.parent, 4)


@pytest.mark.parametrize(
    "content",
    ["null", "[]", "3", '"x"', "{}", '{"format": 1}', '{"format": "2"}', '{"state.json": null}', "\xff", "[" * 100_000],
)
def test_an_invalid_manifest_is_damage(two_checkpoints: Checkpoints, make: Make, same: Same, content: str) -> None:
    (two_checkpoints.folder / NEWEST / MANIFEST).write_text(content, encoding="latin-1")
    assert same(two_checkpoints.latest(), make(3))


def test_a_manifest_of_another_step_is_damage(
    two_checkpoints: Checkpoints, make: Make, same: Same, caplog: pytest.LogCaptureFixture
) -> None:
    (two_checkpoints.folder / NEWEST).rename(two_checkpoints.folder / "step-000000009")
    assert same(two_checkpoints.latest(), make(3))
    assert "manifest.json is of step 4" in caplog.text


def test_without_an_intact_checkpoint_there_is_none(
    two_checkpoints: Checkpoints, make: Make, same: Same, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 4):
        damage(two_checkpoints.folder / f"step-{step:09d}" / STATE, "half")
    assert two_checkpoints.latest() is None
    assert len(caplog.messages) == 3
    assert caplog.messages[-1] == "no other checkpoint to start from"
    two_checkpoints.save(5, make(5))
    assert same(two_checkpoints.latest(), make(5))


def test_only_the_newest_damaged_checkpoint_is_kept(two_checkpoints: Checkpoints, make: Make) -> None:
    for step in range(5, 12):
        two_checkpoints.save(step, make(step))
        damage(two_checkpoints.folder / f"step-{step:09d}" / STATE, "last byte")
        two_checkpoints.latest()
    two_checkpoints.save(20, make(20))
    assert sorted(path.name for path in two_checkpoints.folder.glob("damaged-*")) == ["damaged-000000011"]


def test_a_step_may_be_damaged_repeatedly(two_checkpoints: Checkpoints, make: Make, same: Same) -> None:
    for _ in range(3):
        damage(two_checkpoints.folder / NEWEST / STATE, "last byte")
        assert same(two_checkpoints.latest(), make(3))
        two_checkpoints.save(4, make(4))
    assert same(two_checkpoints.latest(), make(4))


def test_pruning_does_not_count_damaged_checkpoints(
    two_checkpoints: Checkpoints, make: Make, same: Same, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest lacks a file; if the next save did not check that, it would remove the older, good one."""
    (two_checkpoints.folder / NEWEST / TENSORS).unlink()
    two_checkpoints.save(5, make(5))
    assert f"{NEWEST} is damaged ({TENSORS} is missing)" in caplog.text
    assert two_checkpoints.steps() == [3, 5]
    damage(two_checkpoints.folder / "step-000000005" / TENSORS, "last byte")
    assert same(two_checkpoints.latest(), make(3))


def test_a_read_error_is_damage(
    two_checkpoints: Checkpoints,
    make: Make,
    same: Same,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_bytes = Path.read_bytes

    def fail(self: Path) -> bytes:
        if self.name == STATE and NEWEST in str(self):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert same(two_checkpoints.latest(), make(3))
    assert f"{STATE} cannot be read: Input/output error" in caplog.text


def test_a_permission_error_is_not_damage(two_checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that this user may not read is not put aside."""

    def deny(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", deny)
        with pytest.raises(UserError, match="permission denied"):
            two_checkpoints.latest()
    assert two_checkpoints.steps() == [3, 4]


def test_files_of_two_checkpoints_are_damage(two_checkpoints: Checkpoints, make: Make, same: Same) -> None:
    """Intact files of two checkpoints do not make one checkpoint."""
    for name in (STATE, STEPS, TENSORS):
        file = two_checkpoints.folder / NEWEST / name
        file.write_bytes((two_checkpoints.folder / "step-000000003" / name).read_bytes())
        assert same(two_checkpoints.latest(), make(3))
        two_checkpoints.save(4, make(4))


def test_other_files_in_the_folder_are_not_touched(two_checkpoints: Checkpoints, make: Make, same: Same) -> None:
    """Files and folders that are not checkpoints stay untouched."""
    others: dict[str, Any] = {"step-12": None, "step-abc": None, "notes.txt": "x", "tmp-000000009": None}
    for name, content in others.items():
        (two_checkpoints.folder / name).mkdir() if content is None else (two_checkpoints.folder / name).write_text(
            content
        )
    two_checkpoints.save(5, make(5))
    assert same(two_checkpoints.latest(), make(5))
    assert two_checkpoints.steps() == [4, 5]
    assert all((two_checkpoints.folder / name).exists() for name in others)


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_is_read_back_before_it_counts(
    file: str, tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk changes as it writes is noticed while an earlier checkpoint is still there."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make(1))

    def flip(path: Path) -> None:
        if path.name == file:
            damage(path, "middle byte")

    monkeypatch.setattr(writer, "_drop_page_cache", flip)
    with pytest.raises(WorkError, match="read back after writing"):
        checkpoints.save(2, make(2))
    assert checkpoints.steps() == [1]
