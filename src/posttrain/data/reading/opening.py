"""Files opened for reading, whatever compresses them and wherever they lie."""

import gzip
import io
import stat
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, cast

import pyarrow as pa

from posttrain.data.reading.paths import Place, Url, compression, reaching
from posttrain.data.reading.problem import Problem
from posttrain.data.reading.row import BadFile

LINE_BYTES = 64 << 20
"""The longest line that is read; a longer one is a file without line ends, and would have to fit into memory."""


def problem_of(path: Place, name: str) -> Problem | None:
    """Why the file cannot be opened, before it is: opening a pipe would wait for ever."""
    if isinstance(path, Url):
        return None
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            fix = "mend the link, or name the file itself"
            return Problem(name, None, "missing file", "is a link to a file that is not there", fix)
        return Problem(name, None, "missing file", "there is no such file", "check the path")
    except (OSError, ValueError) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        return Problem(name, None, "unreadable file", message)
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return Problem(name, None, "not a file", "is a pipe, a socket or a device, not a file", "save it to a file")
    return None


@contextmanager
def opened(path: Place, name: str) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file.

    Raises:
        OSError, UserError: it cannot be reached.
        BadFile: it is not what its suffix says, or ends too early; see :func:`lines` for the line.
    """
    with ExitStack() as stack:
        if isinstance(path, Url):
            stack.enter_context(reaching(path, name))
            source = stack.enter_context(io.BufferedReader(path.files().open(path.url, "rb")))
        else:
            source = stack.enter_context(path.open("rb"))
        match compression(path):
            case ".gz":
                yield cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=source)))
            case ".zst":
                stream = stack.enter_context(pa.CompressedInputStream(pa.PythonFile(source, "r"), "zstd"))
                yield stack.enter_context(io.BufferedReader(stream))
            case _:
                yield source


def lines(file: IO[bytes], name: str, first_line: int = 1) -> Iterator[bytes]:
    """The lines of a file with their ends; of one longer than `LINE_BYTES` only its first `LINE_BYTES` + 1 bytes.

    Raises:
        BadFile: the compressed data is damaged or ends too early.
    """
    line = first_line
    try:
        while raw := file.readline(LINE_BYTES + 1):
            rest = raw
            while len(raw) > LINE_BYTES and rest and not rest.endswith(b"\n"):
                rest = file.readline(1 << 20)
            yield raw
            line += 1
    except (EOFError, zlib.error, OSError) as error:
        raise damaged(error, name, line) from None


def damaged(error: Exception, name: str, line: int | None) -> Exception:
    """What to raise when decompressing fails: a `BadFile`, or the error itself when it is one of the disk."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    if isinstance(error, EOFError) or "Truncated" in str(error):
        whole = "; the lines before are whole" if line is not None and line > 1 else ""
        message, fix = "the compressed data ends too early", f"get the file again{whole}"
    else:
        message, fix = "is not compressed as its name says, or damaged", "get the file again"
    return BadFile(Problem(name, line, "damaged file", message, fix))


def too_long(name: str, line: int) -> Problem:
    """The problem of a line longer than `LINE_BYTES`."""
    message = f"the line is longer than {LINE_BYTES:,} bytes, the most that is read"
    return Problem(name, line, "line too long", message, "put one record on a line, or split the record")


def range_lines(path: str | Path, start: int, stop: int) -> Iterator[bytes]:
    """The lines of a plain local file from byte ``start``, where one begins, to byte ``stop``."""
    with open(path, "rb") as file:
        file.seek(start)
        left = stop - start
        while left > 0 and (raw := file.readline(min(left, LINE_BYTES + 1))):
            left -= len(raw)
            yield raw
            if len(raw) > LINE_BYTES and not raw.endswith(b"\n"):
                while left > 0 and not raw.endswith(b"\n") and (raw := file.readline(min(left, 1 << 20))):
                    left -= len(raw)
