"""The files that records come from, known by their content."""

import hashlib
from pathlib import Path

from posttrain.data.reading.paths import Place, reaching
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest


def content_digest(path: Place, name: str) -> str:
    """SHA-256 of a file, or of the names and contents of a folder's files: 64 hex characters.

    Raises:
        UserError: it is missing or cannot be read.
    """
    if not isinstance(path, Path):
        with reaching(path, name), path.files().open(path.url, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    total = hashlib.sha256()
    try:
        for file in files:
            total.update(f"{file.relative_to(path).as_posix()}\0{file_digest(file)}\n".encode())
    except FileNotFoundError:
        raise UserError("there is no such file", where=name, fix="check the path") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=name) from None
    return total.hexdigest()
