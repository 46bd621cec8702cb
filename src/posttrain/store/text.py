"""A text file of the user's, whole."""

from pathlib import Path

from posttrain.store.errors import UserError


def read_text(path: Path, name: str) -> str:
    """The text of a UTF-8 file, without the byte order mark that spreadsheets put before it.

    Args:
        name: what errors call the file.

    Raises:
        UserError: it is missing, cannot be read or is not UTF-8, with the line.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError("there is no such file", where=name, fix="check the path") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=name) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError("holds bytes that are not UTF-8", where=f"{name}:{line}", fix="save as UTF-8") from None
