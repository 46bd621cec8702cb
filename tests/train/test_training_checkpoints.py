import json
from pathlib import Path

import pytest
import torch

from posttrain.train.checkpoint import Checkpoint, Checkpoints

FILES = ["tensors.safetensors", "state.json", "sha256.json"]


def checkpoint(step: int) -> Checkpoint:
    tensors = {
        "master.w": torch.arange(6, dtype=torch.float32).reshape(2, 3) + step,
        "step.w": torch.tensor(float(step)),
        "random.cpu": torch.get_rng_state(),
        "turned": torch.ones(3, 4).T,
    }
    return Checkpoint(tensors, {"steps": [{"step": step, "loss": 0.1 + step}]})


@pytest.fixture
def two(tmp_path: Path) -> Checkpoints:
    """Checkpoints of steps 3 and 4."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (3, 4):
        checkpoints.save(step, checkpoint(step))
    return checkpoints


def newest(checkpoints: Checkpoints) -> int | None:
    found = checkpoints.latest()
    return None if found is None else int(found.tensors["step.w"])


def test_what_is_saved_is_what_is_found(two: Checkpoints) -> None:
    found = two.latest()
    assert found is not None
    expected = checkpoint(4)
    assert found.state == expected.state
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "never" / "made").latest() is None
    assert list(tmp_path.iterdir()) == []


def test_the_last_two_are_kept(two: Checkpoints) -> None:
    for step in (5, 12):
        two.save(step, checkpoint(step))
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-000000005", "step-000000012"]
    two.save(12, checkpoint(12))
    assert newest(two) == 12


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
        case "truncated":
            file.write_bytes(content[: len(content) // 2])
        case "empty":
            file.write_bytes(b"")
        case "longer":
            file.write_bytes(content + b"\0")
        case "missing":
            file.unlink()
        case "a folder":
            file.unlink()
            file.mkdir()


HOWS = ["first byte", "middle byte", "last byte", "truncated", "empty", "longer", "missing", "a folder"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_checkpoint_is_named_and_stepped_over(
    two: Checkpoints, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    damage(two.folder / "step-000000004" / name, how)
    assert newest(two) == 3
    (message,) = caplog.messages
    assert "step-000000004 is damaged" in message
    assert "going back to the one before" in message
    assert "\n" not in message
    # What was damaged does not push a good checkpoint out.
    two.save(5, checkpoint(5))
    damage(two.folder / "step-000000005" / name, how)
    assert newest(two) == 3


@pytest.mark.parametrize("content", ["null", "[]", "3", '"x"', "{}", '{"state.json": null}', "\xff"])
def test_checksums_that_are_none(two: Checkpoints, content: str) -> None:
    (two.folder / "step-000000004" / "sha256.json").write_text(content, encoding="latin-1")
    assert newest(two) == 3


def test_every_byte_of_the_small_files_counts(two: Checkpoints) -> None:
    files = {name: (two.folder / "step-000000004" / name).read_bytes() for name in ("state.json", "sha256.json")}
    for name, whole in files.items():
        for position in range(0, len(whole), 3):
            two.save(4, checkpoint(4))
            flipped = bytearray(whole)
            flipped[position] ^= 0x08
            (two.folder / "step-000000004" / name).write_bytes(flipped)
            assert newest(two) == 3, (name, position)


def test_all_are_damaged(two: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    for step in (3, 4):
        damage(two.folder / f"step-{step:09d}" / "state.json", "truncated")
    assert two.latest() is None
    assert len(caplog.messages) == 2


def test_a_half_written_checkpoint_is_none(two: Checkpoints) -> None:
    half = two.folder / "tmp-000000009"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    assert newest(two) == 4
    two.save(5, checkpoint(5))
    assert not half.exists(), "what a killed process left does not stay for ever"
    assert newest(two) == 5


def test_a_kill_while_writing(two: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever writing stops, the checkpoint before is found."""
    for name in ("save_file", "file_digest", "sync_file", "sync_folder"):
        with monkeypatch.context() as patch:

            def killed(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(f"posttrain.train.checkpoint.{name}", killed)
            with pytest.raises(KeyboardInterrupt):
                two.save(5, checkpoint(5))
        assert newest(two) == 4
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            two.save(5, checkpoint(5))
    assert newest(two) == 4
    two.save(5, checkpoint(5))
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-000000004", "step-000000005"]


def test_checkpoints_hold_tensors_and_json_only(two: Checkpoints) -> None:
    folder = two.folder / "step-000000004"
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    assert set(json.loads((folder / "sha256.json").read_text())) == {"tensors.safetensors", "state.json"}
