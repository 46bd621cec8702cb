"""Damage of any kind is found, named and stepped over."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.store.errors import UserError
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
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
    [(name, how) for name in FILES for how in HOWS if (name, how) != (STEPS, "longer")],  # which others make it
)
def test_a_damaged_checkpoint_is_named_and_stepped_over(
    two: Checkpoints, make: Make, same: Same, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    damage(two.folder / NEWEST / name, how)
    assert same(two.latest(), make(3))
    said, going_back = caplog.messages
    assert f"{NEWEST} is damaged (" in said
    assert name in said
    assert "put aside as damaged-000000004" in said
    assert "\n" not in said
    assert going_back == "using the checkpoint of step 3 instead"
    assert two.steps() == [3]
    # What was damaged does not push a good checkpoint out.
    two.save(5, make(5))
    damage(two.folder / "step-000000005" / name, how)
    assert same(two.latest(), make(3))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_every_byte_counts(two: Checkpoints, make: Make, same: Same, name: str) -> None:
    folder = two.folder / NEWEST
    file = folder / name
    whole = file.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint, match=name):
            read_checkpoint(folder, 4)
    file.write_bytes(whole)
    assert same(read_checkpoint(folder, 4), make(4))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_any_file(two: Checkpoints, data: st.DataObject) -> None:
    file = two.folder / NEWEST / data.draw(st.sampled_from(FILES))
    whole = file.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    changed = whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:]
    file.write_bytes(changed)
    try:
        if changed == whole or (file.name == STEPS and changed.startswith(whole)):
            read_checkpoint(file.parent, 4)
        else:
            with pytest.raises(DamagedCheckpoint):
                read_checkpoint(file.parent, 4)
    finally:
        file.write_bytes(whole)


def test_the_damaged_tensor_is_named(two: Checkpoints, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    file = two.folder / NEWEST / TENSORS
    entries = json.loads((two.folder / NEWEST / MANIFEST).read_bytes())["tensors"]
    whole = file.read_bytes()
    for name, entry in entries.items():
        for position in (entry["start"], entry["start"] + entry["size"] - 1):
            flipped = bytearray(whole)
            flipped[position] ^= 4
            file.write_bytes(flipped)
            with pytest.raises(DamagedCheckpoint) as caught:
                read_checkpoint(file.parent, 4)
            assert str(caught.value) == f"{TENSORS} does not match its checksums in `{name}`"
    file.write_bytes(whole[:-1])
    last = max(entries, key=lambda name: entries[name]["start"])
    assert two.at(4) is None
    assert f"has {len(whole) - 1} bytes instead of {len(whole)}: `{last}` cut off" in caplog.text


def test_many_damaged_tensors_are_one_line(two: Checkpoints) -> None:
    file = two.folder / NEWEST / TENSORS
    entries = json.loads((two.folder / NEWEST / MANIFEST).read_bytes())["tensors"]
    start = min(entry["start"] for entry in entries.values())
    file.write_bytes(file.read_bytes()[:start] + bytes(255 - byte for byte in file.read_bytes()[start:]))
    with pytest.raises(DamagedCheckpoint, match=r"in `master.w`, `half`, `step` and 2 more$"):
        read_checkpoint(file.parent, 4)


@pytest.mark.parametrize(
    "content",
    ["null", "[]", "3", '"x"', "{}", '{"format": 1}', '{"format": "2"}', '{"state.json": null}', "\xff", "[" * 100_000],
)
def test_a_manifest_that_is_none(two: Checkpoints, make: Make, same: Same, content: str) -> None:
    (two.folder / NEWEST / MANIFEST).write_text(content, encoding="latin-1")
    assert same(two.latest(), make(3))


def test_a_manifest_of_another_step(two: Checkpoints, make: Make, same: Same, caplog: pytest.LogCaptureFixture) -> None:
    (two.folder / NEWEST).rename(two.folder / "step-000000009")
    assert same(two.latest(), make(3))
    assert "manifest.json is of step 4" in caplog.text


def test_a_folder_of_the_old_format(two: Checkpoints, make: Make, same: Same) -> None:
    old = two.folder / "step-000000009"
    old.mkdir()
    (old / "sha256.json").write_text("{}")
    assert same(two.latest(), make(4))


@pytest.mark.parametrize("other", [1, 3])
def test_another_format_is_left_alone(
    two: Checkpoints, make: Make, same: Same, caplog: pytest.LogCaptureFixture, other: int
) -> None:
    """Only this version cannot read it: it is neither used nor removed, however many are saved afterwards."""
    manifest = two.folder / NEWEST / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_bytes()), "format": other, "new": "thing"}))
    assert same(two.latest(), make(3))
    said = f"{NEWEST} cannot be used ({MANIFEST} has format {other}, and this version of posttrain reads 2)"
    assert said in caplog.text
    for step in range(5, 9):
        two.save(step, make(step))
    assert (two.folder / "other-format-000000004" / TENSORS).is_file()
    assert two.steps() == [7, 8]


def test_all_are_damaged(two: Checkpoints, make: Make, same: Same, caplog: pytest.LogCaptureFixture) -> None:
    for step in (3, 4):
        damage(two.folder / f"step-{step:09d}" / STATE, "half")
    assert two.latest() is None
    assert len(caplog.messages) == 3
    assert caplog.messages[-1] == "no other checkpoint to start from"
    two.save(5, make(5))
    assert same(two.latest(), make(5))


def test_the_newest_damaged_one_stays_for_a_look(two: Checkpoints, make: Make) -> None:
    for step in range(5, 12):
        two.save(step, make(step))
        damage(two.folder / f"step-{step:09d}" / STATE, "last byte")
        two.latest()
    two.save(20, make(20))
    assert sorted(path.name for path in two.folder.glob("damaged-*")) == ["damaged-000000011"]


def test_the_same_step_damaged_twice(two: Checkpoints, make: Make, same: Same) -> None:
    for _ in range(3):
        damage(two.folder / NEWEST / STATE, "last byte")
        assert same(two.latest(), make(3))
        two.save(4, make(4))
    assert same(two.latest(), make(4))


def test_pruning_does_not_count_what_is_damaged(
    two: Checkpoints, make: Make, same: Same, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is gone from the newest; without a look at it, the next save would remove the older, good one."""
    (two.folder / NEWEST / TENSORS).unlink()
    two.save(5, make(5))
    assert f"{NEWEST} is damaged ({TENSORS} is missing)" in caplog.text
    assert two.steps() == [3, 5]
    damage(two.folder / "step-000000005" / TENSORS, "last byte")
    assert same(two.latest(), make(3))


def test_damage_of_the_best(folder: Path, make: Make, same: Same) -> None:
    checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=9))
    for step, metric in ((1, 0.3), (2, 0.1), (3, 0.2)):
        checkpoints.save(step, make(step), metric=metric)
    assert same(checkpoints.best(), make(2))
    damage(folder / "step-000000002" / TENSORS, "last byte")
    assert same(checkpoints.best(), make(3))
    damage(folder / "step-000000003" / MANIFEST, "half")
    assert same(checkpoints.best(), make(1))


def test_a_disk_that_cannot_read(
    two: Checkpoints, make: Make, same: Same, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_bytes = Path.read_bytes

    def failing(self: Path) -> bytes:
        if self.name == STATE and NEWEST in str(self):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", failing)
    assert same(two.latest(), make(3))
    assert f"{STATE} cannot be read: Input/output error" in caplog.text


def test_missing_permissions_are_no_damage(two: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put aside because this user may not read it."""

    def refused(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        with pytest.raises(UserError, match="permission denied"):
            two.latest()
    assert two.steps() == [3, 4]


def test_a_damaged_state_is_not_half_a_checkpoint(two: Checkpoints, make: Make, same: Same) -> None:
    """Files of two checkpoints, each whole, are none together."""
    for name in (STATE, STEPS, TENSORS):
        file = two.folder / NEWEST / name
        file.write_bytes((two.folder / "step-000000003" / name).read_bytes())
        assert same(two.latest(), make(3))
        two.save(4, make(4))


def test_strangers_in_the_folder(two: Checkpoints, make: Make, same: Same) -> None:
    """What is no checkpoint is left as it is."""
    strangers: dict[str, Any] = {"step-12": None, "step-abc": None, "notes.txt": "x", "tmp-000000009": None}
    for name, content in strangers.items():
        (two.folder / name).mkdir() if content is None else (two.folder / name).write_text(content)
    two.save(5, make(5))
    assert same(two.latest(), make(5))
    assert two.steps() == [4, 5]
    assert all((two.folder / name).exists() for name in strangers)
