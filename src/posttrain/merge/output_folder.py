"""The folder of a merged model: written under another name, completed with config and tokenizer, and renamed."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from posttrain.merge.plan import MergePlan
from posttrain.merge.result_config import result_config
from posttrain.merge.sources import CONFIG
from posttrain.models.loading import GENERATION_CONFIG
from posttrain.store.errors import StorageError, UserError
from posttrain.store.files import (
    disk_errors,
    make_folder,
    remove_abandoned_folders,
    sync_folder,
    temporary_folder,
    write_atomically,
)

_TEMPORARY = ".posttrain-merge"

_ATTEMPTS = 100

_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens*", "vocab*", "merges.txt", "added_tokens*", "chat_template*"),
    *("*.model", "*.jinja", "*.tiktoken", "tekken.json"),
)

_CHAT_TEMPLATES = "additional_chat_templates"

# What a merged model has from the first: not its weights, adapters and records of its training, and no pickles.
_COPIED = (GENERATION_CONFIG, "*processor_config.json", "LICENSE*", "NOTICE*")


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yields a temporary folder below ``parent``, and removes those that killed merges have left there."""
    # In a folder of our own, as all that is abandoned in it is removed.
    temporary = parent / _TEMPORARY
    make_folder(parent)
    try:
        with _scratch_folder(temporary) as scratch:
            yield scratch
    finally:
        with suppress(OSError):  # another merge may be writing beside this one
            temporary.rmdir()


@contextmanager
def _scratch_folder(parent: Path) -> Iterator[Path]:
    """Yields a temporary folder below ``parent``, which another merge may remove at any moment where it is empty."""
    with ExitStack() as stack:
        for attempt in range(_ATTEMPTS):
            try:
                remove_abandoned_folders(parent)
                folder = stack.enter_context(temporary_folder(parent))
                break
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1:
                    raise
        yield folder


def remove_abandoned(parent: Path) -> None:
    """Removes the temporary folders that killed merges have left below a folder."""
    temporary = parent / _TEMPORARY
    with disk_errors(parent), suppress(FileNotFoundError):
        remove_abandoned_folders(temporary)
    with suppress(OSError):
        temporary.rmdir()


def commit(folder: Path, out: Path) -> None:
    """Moves the finished folder to where it was asked for, in one step."""
    with disk_errors(out):
        try:
            os.rename(folder, out)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _out_exists(out) from None  # another merge has written there meanwhile
            raise
        try:
            sync_folder(out.absolute().parent)
        except OSError:
            os.rename(out, folder)  # else the same command again would only say that it exists
            raise


def check_new_folder(out: Path) -> None:
    """Raises a UserError if there is something where the merged model would be written."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise _out_exists(out)


def _out_exists(out: Path) -> UserError:
    return UserError("exists and is not empty", where=str(out), fix="remove it or name another folder")


def check_space(plan: MergePlan, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < plan.bytes:
        raise StorageError(
            f"the result needs {plan.bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free",
            where=str(folder.parent),
            fix="free some space and run the same command again",
        )


def write_config(plan: MergePlan, folder: Path) -> None:
    """Copies config and tokenizer, with what the merge changed."""
    with disk_errors(folder):
        for file in sorted(plan.template.folder.iterdir()):
            if file.is_file() and _matches(file.name, _COPIED):
                shutil.copyfile(file, folder / file.name)
    copy_tokenizer(plan, folder)
    if plan.token_ids is not plan.template:
        (folder / GENERATION_CONFIG).unlink(missing_ok=True)
        if (own := plan.token_ids.folder / GENERATION_CONFIG).is_file():
            with disk_errors(folder):
                shutil.copyfile(own, folder / GENERATION_CONFIG)
    write_atomically(folder / CONFIG, json.dumps(result_config(plan), indent=2).encode())


def copy_tokenizer(plan: MergePlan, folder: Path) -> None:
    with disk_errors(folder):
        for file in sorted(plan.tokenizer.iterdir()):
            if file.is_file() and _matches(file.name, _TOKENIZER_FILES):
                shutil.copyfile(file, folder / file.name)
            elif file.is_dir() and file.name == _CHAT_TEMPLATES:
                shutil.copytree(file, folder / file.name)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not name.startswith(".") and any(fnmatch(name, pattern) for pattern in patterns)
