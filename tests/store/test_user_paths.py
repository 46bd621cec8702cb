"""Paths that no file can have, and what is not a file, are refused before anything opens them."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.store.errors import UserError
from posttrain.store.paths import check_path, locate_path, to_path_mistake

NO_FILE = "is a pipe, a socket or a device, not a file; save it to a file"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def linked_pipe(folder: Path) -> Path:
    (folder / "link").symlink_to(pipe(folder))
    return folder / "link"


def listening(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "s"))
    return folder / "s"


def loop(folder: Path) -> Path:
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


UNUSABLE: list[tuple[Callable[[Path], Path], str]] = [
    (pipe, NO_FILE),
    (linked_pipe, NO_FILE),
    (listening, NO_FILE),
    (lambda folder: Path("/dev/zero"), NO_FILE),
    (loop, "cannot be read: Too many levels of symbolic links"),
    (lambda folder: folder / ("x" * 300), "cannot be read: File name too long"),
    (lambda folder: folder.joinpath(*["x" * 100] * 50), "cannot be read: File name too long"),
    (lambda folder: folder / "a\0b", "cannot be read: embedded null byte"),
]


@pytest.mark.parametrize(("make", "message"), UNUSABLE)
def test_unusable_paths_are_refused(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    path = make(tmp_path)
    for check in (lambda: check_path(path), lambda: locate_path(Path(), str(path))):
        with pytest.raises(UserError) as error:
            check()
        assert message in str(error.value)
        assert len(str(error.value)) < 400
        assert str(error.value).isprintable()


def test_files_folders_and_what_is_missing_are_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "missing", tmp_path / "file" / "below"):
        check_path(path)


def test_a_home_of_nobody_is_refused() -> None:
    with pytest.raises(UserError, match="~nobody-here/x: names no user's home"):
        locate_path(Path(), "~nobody-here/x")


def test_the_errors_of_an_unchecked_path_are_told_from_others(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / ("x" * 300), tmp_path / "a\0b", tmp_path / "loop"):
        with pytest.raises((OSError, ValueError)) as error:
            path.open()
        assert isinstance(to_path_mistake(error.value), UserError)
    with pytest.raises((OSError, RuntimeError)) as error:
        (tmp_path / "loop").resolve(strict=True)
    assert isinstance(to_path_mistake(error.value), UserError)
    for other in (FileNotFoundError(2, "no", "x"), ValueError("x"), RuntimeError("x"), OSError(28, "full")):
        assert to_path_mistake(other) is None
