"""The user's text files: with a byte order mark or without, and what is wrong in one line."""

from pathlib import Path

import pytest

from posttrain.store.errors import UserError
from posttrain.store.text_files import read_text


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(mark + "één\ntwee\n".encode())
    assert read_text(tmp_path / "a.txt", "a.txt") == "één\ntwee\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.txt", None, "it: there is no such file; check the path"),
        (".", None, "it: cannot be read: Is a directory"),
        ("a.txt", b"one\ntwo\ncaf\xe9\n", "it:3: holds bytes that are not UTF-8; save as UTF-8"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_text(tmp_path / name, "it")
    assert str(caught.value) == says
