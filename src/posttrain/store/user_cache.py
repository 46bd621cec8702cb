"""The user's cache: values and folders that any process of this machine may reuse, and that nothing depends on."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.store.errors import UserError
from posttrain.store.files import (
    copy_files,
    folder_files,
    read_checked,
    remove_tree,
    sync_tree,
    temporary_folder,
    write_checked,
)
from posttrain.store.hashing import file_digest

log = logging.getLogger("posttrain")


def read_user_cache(kind: str, key: str) -> Any:
    """Returns the value under a key; None if there is none, it is damaged, or the cache cannot be read."""
    file = _file(kind, key)
    try:
        content = read_checked(file) if file else None
        return None if content is None else json.loads(content)["value"]
    except (OSError, ValueError, KeyError, TypeError):  # no permission, a folder of its name, or of another version
        return None


def write_user_cache(kind: str, key: str, value: Any) -> None:
    """Keeps a JSON value under a key; a cache that cannot be written costs the next process the work again."""
    file = _file(kind, key)
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_checked(file, json.dumps({"key": key, "value": value}).encode())
    except (UserError, OSError) as error:
        log.debug("not kept in the user's cache: %s", error)


def fill_folder(kind: str, key: str, folder: Path, make: Callable[[Path], None]) -> None:
    """Fills a folder with a copy of the files under a key; where there are none, ``make`` fills it, and they are kept.

    Files that are damaged are made again, and a cache that cannot be written costs the next process the work again.
    """
    kept, checksums = _file(kind, key), read_user_cache(f"{kind}-checksums", key)
    if kept is not None and checksums is not None:
        try:
            copy_files(kept, folder)
            if _checksums(folder) == checksums:
                return
            log.warning("%s is damaged, and made again", kept)
        except (OSError, ValueError) as error:
            log.debug("not read from the user's cache: %s", error)
        remove_tree(folder)
    make(folder)
    if kept is None:
        return
    try:
        remove_tree(kept)
        with temporary_folder(kept.parent) as part:
            copy_files(folder, part)
            sync_tree(part)
            part.rename(kept)
        write_user_cache(f"{kind}-checksums", key, _checksums(folder))
    except (UserError, OSError, ValueError) as error:
        log.debug("not kept in the user's cache: %s", error)


def _checksums(folder: Path) -> dict[str, str]:
    return {name: file_digest(path) for name, path in folder_files(folder).items()}


def cache_folder() -> Path | None:
    """Returns the folder of the cache, which need not exist; None if the user has no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "posttrain"


def _file(kind: str, key: str) -> Path | None:
    """Returns the file of a key; None if the user has no home."""
    # A file a key, so that processes with other keys do not overwrite each other's values.
    folder = cache_folder()
    return folder and folder / kind / hashlib.sha256(key.encode()).hexdigest()[:32]
