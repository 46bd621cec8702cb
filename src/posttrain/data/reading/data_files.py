"""Finds, opens, decompresses and hashes files of records: local paths, globs and URLs."""

import glob
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import pyarrow as pa

from posttrain.data.reading.rows import BadFile, Problem
from posttrain.store.errors import StorageError, UserError
from posttrain.store.hashing import file_digest
from posttrain.store.installation import file_system_hint
from posttrain.store.paths import check_path, locate_path, path_problem

COMPRESSIONS = (".gz", ".zst")

DELIMITERS = {".csv": ",", ".tsv": "\t"}

_HUB_NAME = re.compile(r"[\w-]+/[\w-]+")

# A longer line is most likely a file without line ends, such as an archive, and would be held in memory as a whole.
MAX_LINE_BYTES = 64 << 20
"""Bytes of the longest line that is read."""


@dataclass(frozen=True)
class Url:
    """A file behind a URL such as ``s3://bucket/key``.

    Credentials, region and endpoint come from the environment, for S3 as every AWS tool reads them.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0]

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    def files(self) -> Any:
        """Returns the fsspec file system of the URL.

        Raises:
            UserError: nothing installed knows the protocol.
        """
        import fsspec

        if "::" in self.url:
            raise UserError("chained URLs are not read", where=self.url, fix="name the file itself")
        try:
            # Without the cache a file that was added a moment ago would not be listed.
            return fsspec.filesystem(self.protocol, use_listings_cache=False)
        except (ImportError, ValueError):
            fix = file_system_hint(self.protocol)
            raise UserError(f"nothing installed reads {self.protocol}://", where=self.url, fix=fix) from None


DataPath = Path | Url


def to_data_path(name: str | DataPath) -> DataPath:
    """Parses a name as a path or a URL."""
    if isinstance(name, str):
        return Url(name) if "://" in name else Path(name)
    return name


def locate_file(root: Path, name: str) -> DataPath:
    """Resolves a file's name against ``root``; URLs stay.

    Raises:
        UserError: it is a pipe, a device, or a folder without data.
    """
    if "://" in name:
        return to_data_path(name)
    path = locate_path(root, name)
    # Before its files are hashed: a folder such as `~` or `/` holds millions.
    if path.is_dir() and not _is_data_folder(path) and not any(path.glob("*.arrow")):
        fix = "name a file, or a folder that `datasets` has saved"
        raise UserError("the folder holds no .arrow files", where=name, fix=fix)
    return path


def file_format(path: DataPath) -> str:
    """Returns the suffix of the format, such as ``.jsonl`` for ``a.jsonl.gz``."""
    suffix = path.suffix.lower()
    return Path(path.name).with_suffix("").suffix.lower() if suffix in COMPRESSIONS else suffix


def has_fixed_columns(path: DataPath) -> bool:
    """Returns True if all rows of the file have the same columns, so that a problem with columns is reported once."""
    return (isinstance(path, Path) and path.is_dir()) or file_format(path) in (*DELIMITERS, ".parquet")


def compression(path: DataPath) -> str | None:
    """Returns ``.gz``, ``.zst`` or None."""
    return path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else None


def expand_paths(names: Sequence[str], root: Path) -> list[DataPath]:
    """Expands names to files, each once, those of a glob sorted by name.

    Args:
        names: files, folders that `datasets` has saved, globs (``data/*.jsonl``, ``**`` for any folders) and URLs.
        root: the folder that relative names start from.

    Raises:
        UserError: a glob matches nothing, or its URL cannot be reached.
    """
    paths: dict[DataPath, None] = {}
    for name in names:
        paths.update(dict.fromkeys(_expand_remote(name) if "://" in name else _expand_local(name, root)))
    return list(paths)


def display_path(path: DataPath, root: Path) -> str:
    """Formats a path from `expand_paths` as the user would write it."""
    if isinstance(path, Path) and path.is_relative_to(root):
        return str(path.relative_to(root))
    return str(path)


@contextmanager
def remote_errors(url: Url, name: str) -> Iterator[None]:
    """Turns the errors of a remote file system into errors of one line.

    Raises:
        UserError: it is not there.
        Refused: it cannot be reached.
    """
    errors: tuple[type[Exception], ...] = (OSError,)
    if url.protocol in ("s3", "s3a"):
        from botocore.exceptions import BotoCoreError  # not an OSError, such as missing credentials

        errors = (OSError, BotoCoreError)
    try:
        yield
    except FileNotFoundError:
        raise UserError("there is no such file", where=name, fix="check the URL") from None
    except errors as error:
        raise StorageError(
            f"cannot be read: {' '.join(str(error).split()) or type(error).__name__}", where=name
        ) from None


def _is_glob(name: str) -> bool:
    return any(character in name for character in "*?[")


def _expand_local(name: str, root: Path) -> list[DataPath]:
    path = root / name
    check_path(path, name)
    # The name of a file may hold `[` or `*` itself.
    if not _is_glob(name) or path.exists():
        return [path]
    # The folder is not a pattern, even if its name holds `*` or `[`. Sorted, as records count in this order.
    matches = sorted(Path(match) for match in glob.glob(str(Path(glob.escape(str(root))) / name), recursive=True))
    files: list[DataPath] = [match for match in matches if not match.is_dir() or _is_data_folder(match)]
    if not files:
        raise UserError("no file matches", where=name, fix="check the pattern")
    return files


def _is_data_folder(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("state.json", "dataset_dict.json", "dataset_info.json"))


def _expand_remote(name: str) -> list[DataPath]:
    url = Url(name)
    if not _is_glob(name):
        return [url]
    files = url.files()
    with remote_errors(url, name):
        matches = sorted(path for path, info in files.glob(name, detail=True).items() if info["type"] == "file")
    if not matches:
        raise UserError("no file matches", where=name, fix="check the pattern")
    return [Url(f"{url.protocol}://{match}") for match in matches]


def access_problem(path: DataPath, name: str) -> Problem | None:
    """Returns the problem of a file that cannot be opened, or None."""
    if isinstance(path, Url):
        return None
    if problem := path_problem(path):
        return Problem(name, None, *problem)
    if not path.exists():
        if path.is_symlink():
            fix = "mend the link, or name the file itself"
            return Problem(name, None, "missing file", "is a link to a file that is not there", fix)
        hint = f"; a dataset of the Hub is hub:{name}:SPLIT" if _HUB_NAME.fullmatch(name) else ""
        return Problem(name, None, "missing file", "there is no such file", f"check the path{hint}")
    return None


@contextmanager
def open_file(path: DataPath, name: str) -> Iterator[IO[bytes]]:
    """Opens a file for its decompressed bytes.

    Raises:
        OSError, UserError: it cannot be reached.
        BadFile: its content does not match its suffix, or ends too early; see `read_lines` for the line.
    """
    with ExitStack() as stack:
        if isinstance(path, Url):
            stack.enter_context(remote_errors(path, name))
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


def read_lines(file: IO[bytes], name: str, first_line: int = 1) -> Iterator[bytes]:
    """Yields the lines of a file with their ends; of a line over `MAX_LINE_BYTES` the first `MAX_LINE_BYTES` + 1 bytes.

    Raises:
        BadFile: the compressed data is damaged or ends too early.
    """
    line = first_line
    try:
        while raw := file.readline(MAX_LINE_BYTES + 1):
            rest = raw
            while len(raw) > MAX_LINE_BYTES and rest and not rest.endswith(b"\n"):
                # What is left of a line that is too long is skipped piece by piece.
                rest = file.readline(1 << 20)
            yield raw
            line += 1
    # Damage shows while reading: only here the line is known.
    except (EOFError, zlib.error, OSError) as error:
        raise decompression_error(error, name, line) from None


def decompression_error(error: Exception, name: str, line: int | None) -> Exception:
    """Returns the error to raise when decompression fails: a `BadFile`, or the error itself if the disk failed."""
    # gzip raises OSErrors of its own for bad data; these have no errno.
    if isinstance(error, OSError) and error.errno is not None:
        return error
    if isinstance(error, EOFError) or "Truncated" in str(error):
        whole = "; the lines before are whole" if line is not None and line > 1 else ""
        message, fix = "the compressed data ends too early", f"get the file again{whole}"
    else:
        message, fix = "is not compressed as its name says, or damaged", "get the file again"
    return BadFile(Problem(name, line, "damaged file", message, fix))


def long_line_problem(name: str, line: int) -> Problem:
    """Returns the problem of a line longer than `MAX_LINE_BYTES`."""
    message = f"the line is longer than {MAX_LINE_BYTES:,} bytes, the most that is read"
    return Problem(name, line, "line too long", message, "put one record on a line, or split the record")


def read_line_range(path: str | Path, start: int, stop: int) -> Iterator[bytes]:
    """Yields the lines of a plain local file from byte ``start``, the start of a line, to byte ``stop``."""
    with open(path, "rb") as file:
        file.seek(start)
        remaining = stop - start
        while remaining > 0 and (raw := file.readline(min(remaining, MAX_LINE_BYTES + 1))):
            remaining -= len(raw)
            yield raw
            if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                while remaining > 0 and not raw.endswith(b"\n") and (raw := file.readline(min(remaining, 1 << 20))):
                    remaining -= len(raw)


def content_digest(path: DataPath, name: str) -> str:
    """Returns the SHA-256 of a file, or of the names and contents of a folder's files: 64 hex characters.

    Raises:
        UserError: it is missing or cannot be read.
    """
    if not isinstance(path, Path):
        with remote_errors(path, name), path.files().open(path.url, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    check_path(path, name)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    total = hashlib.sha256()
    try:
        for file in files:
            # Names count too: a folder whose files trade places is another dataset.
            total.update(f"{file.relative_to(path).as_posix()}\0{file_digest(file)}\n".encode())
    except FileNotFoundError:
        raise UserError("there is no such file", where=name, fix="check the path") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=name) from None
    return total.hexdigest()
