"""Where records come from: local paths, globs, and URLs that fsspec knows."""

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain.store.errors import Refused, UserError

COMPRESSIONS = (".gz", ".zst")

_INSTALL = {"s3": "pip install 'posttrain[s3]'", "s3a": "pip install 'posttrain[s3]'", "gs": "pip install gcsfs"}


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
        """The fsspec file system that it lies in.

        Raises:
            UserError: nothing installed knows the protocol.
        """
        import fsspec

        if "::" in self.url:
            raise UserError("chained URLs are not read", where=self.url, fix="name the file itself")
        try:
            return fsspec.filesystem(self.protocol, use_listings_cache=False)
        except (ImportError, ValueError):
            fix = _INSTALL.get(self.protocol, f"install the fsspec package for {self.protocol}")
            raise UserError(f"nothing installed reads {self.protocol}://", where=self.url, fix=fix) from None


Place = Path | Url


def place(name: str | Place) -> Place:
    """A name as a path or a URL."""
    if isinstance(name, str):
        return Url(name) if "://" in name else Path(name)
    return name


def file_format(path: Place) -> str:
    """The suffix that tells the format, such as ``.jsonl`` for ``a.jsonl.gz``."""
    suffix = path.suffix.lower()
    return Path(path.name).with_suffix("").suffix.lower() if suffix in COMPRESSIONS else suffix


def compression(path: Place) -> str | None:
    """``.gz``, ``.zst`` or None."""
    return path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else None


def expand(names: Sequence[str], root: Path) -> list[Place]:
    """The files that ``names`` stand for, each once, those of a glob sorted by name.

    Args:
        names: files, folders that `datasets` has saved, globs (``data/*.jsonl``, ``**`` for any folders) and URLs.
        root: the folder that relative names start from.

    Raises:
        UserError: a glob matches nothing, or its URL cannot be reached.
    """
    found: dict[Place, None] = {}
    for name in names:
        found.update(dict.fromkeys(_remote(name) if "://" in name else _local(name, root)))
    return list(found)


def shown(path: Place, root: Path) -> str:
    """A place that :func:`expand` found, as the user would write it."""
    if isinstance(path, Path) and path.is_relative_to(root):
        return str(path.relative_to(root))
    return str(path)


@contextmanager
def reaching(url: Url, name: str) -> Iterator[None]:
    """Say what goes wrong on the way to a URL in one line.

    Raises:
        UserError: it is not there.
        Refused: it cannot be reached.
    """
    errors: tuple[type[Exception], ...] = (OSError,)
    if url.protocol in ("s3", "s3a"):
        from botocore.exceptions import BotoCoreError

        errors = (OSError, BotoCoreError)
    try:
        yield
    except FileNotFoundError:
        raise UserError("there is no such file", where=name, fix="check the URL") from None
    except errors as error:
        raise Refused(f"cannot be read: {' '.join(str(error).split()) or type(error).__name__}", where=name) from None


def _is_glob(name: str) -> bool:
    return any(character in name for character in "*?[")


def _local(name: str, root: Path) -> list[Place]:
    path = root / name
    if not _is_glob(name) or path.exists():
        return [path]
    matches = sorted(Path(match) for match in glob.glob(str(Path(glob.escape(str(root))) / name), recursive=True))
    files: list[Place] = [match for match in matches if not match.is_dir() or _is_data_folder(match)]
    if not files:
        raise UserError("no file matches", where=name, fix="check the pattern")
    return files


def _is_data_folder(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("state.json", "dataset_dict.json", "dataset_info.json"))


def _remote(name: str) -> list[Place]:
    url = Url(name)
    if not _is_glob(name):
        return [url]
    files = url.files()
    with reaching(url, name):
        matches = sorted(path for path, info in files.glob(name, detail=True).items() if info["type"] == "file")
    if not matches:
        raise UserError("no file matches", where=name, fix="check the pattern")
    return [Url(f"{url.protocol}://{match}") for match in matches]
