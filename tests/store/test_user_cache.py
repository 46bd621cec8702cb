"""Values and folders of the user's cache are read where they are whole, and made again where they are damaged."""

from pathlib import Path

import pytest

from posttrain.store.user_cache import cache_folder, fill_folder, read_user_cache, write_user_cache

FILES = {"model.safetensors": bytes(range(256)) * 40, "nested/config.json": b"{}"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def fill(folder: Path, made: list[Path]) -> dict[str, bytes]:
    def make(target: Path) -> None:
        made.append(target)
        for name, content in FILES.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)

    fill_folder("kind", "key", folder, make)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_made_once_and_again_where_a_byte_or_a_file_is_wrong(tmp_path: Path) -> None:
    made: list[Path] = []
    assert fill(tmp_path / "1", made) == fill(tmp_path / "2", made) == FILES
    assert made == [tmp_path / "1"]
    cache = cache_folder()
    assert cache is not None
    (kept,) = (path for path in (cache / "kind").iterdir() if path.is_dir())
    damages = [
        lambda: (kept / "model.safetensors").write_bytes(FILES["model.safetensors"][:-1] + b"x"),
        lambda: (kept / "nested/config.json").unlink(),
        lambda: (kept / "more.json").write_text("{}"),
    ]
    for number, damage in enumerate(damages, 3):
        damage()
        assert fill(tmp_path / f"{number}", made) == FILES
        assert fill(tmp_path / f"{number} again", made) == FILES
        assert len(made) == number - 1


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    made: list[Path] = []
    assert fill(tmp_path / "1", made) == fill(tmp_path / "2", made) == FILES
    assert len(made) == 2


def test_a_damaged_value_is_not_read() -> None:
    write_user_cache("kind", "key", [1, 2])
    assert read_user_cache("kind", "key") == [1, 2]
    cache = cache_folder()
    assert cache is not None
    (file,) = (cache / "kind").iterdir()
    content = file.read_bytes()
    for damaged in (content.replace(b"[1, 2]", b"[1, 3]"), content[:-1], b""):
        file.write_bytes(damaged)
        assert read_user_cache("kind", "key") is None
