"""The user's text files: a byte order mark is optional, and an error is one line."""

from pathlib import Path

import pytest

from posttrain.store.errors import UserError
from posttrain.store.text_files import read_text


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_is_removed(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(mark + "één\ntwee\n".encode())
    assert read_text(tmp_path / "a.txt", "a.txt") == "één\ntwee\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "it: there is no such file; check the path"),
        (".", None, "it: cannot be read: Is a directory"),
        ("a.txt", b"one\ntwo\ncaf\xe9\n", "it:3: holds bytes that are not UTF-8; save as UTF-8"),
    ],
)
def test_unreadable_files_raise(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_text(tmp_path / name, "it")
    assert str(error.value) == message
