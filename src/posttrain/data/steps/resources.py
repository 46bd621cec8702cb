"""Locates the files and models that steps read, hashes them by content and loads them once a process."""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator

from posttrain.data.reading.data_files import content_digest
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest, file_stats
from posttrain.store.paths import locate_path

if TYPE_CHECKING:
    from posttrain.data.quality.classifier import LinearClassifier
    from posttrain.models.language_model import LanguageModel

Files = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""Files, globs, folders and URLs; a single one needs no list."""

Precision = Literal["float32", "bfloat16", "float16"]


def resolve_path(root: Path, name: str) -> str:
    """Resolves a path that the user gave against ``root``."""
    return str(locate_path(root, name).resolve())


def check_exists(name: str, where: str) -> None:
    """Raises a UserError unless there is such a file or folder."""
    if not Path(name).exists():
        raise UserError(f"there is no `{name}`", where=where, fix="check the path")


def file_key(name: str) -> str:
    """Returns the digest of a file's or folder's content, 64 hex characters; it is read again only after a change.

    Raises:
        UserError: it is missing or cannot be read.
    """
    return _file_key(name, file_state(name))


def file_state(name: str) -> str:
    """Returns a digest of sizes and times of a file or folder, which changes with it, without reading it."""
    path = Path(name)
    return digest(file_stats(path)) if path.exists() else ""


# `state` is part of the cache's key only, so that a file is read again after a change; so below.
@cache
def _file_key(name: str, state: str) -> str:
    return content_digest(Path(name), name)


def load_linear_classifier(folder: str) -> "LinearClassifier":
    """Loads a classifier of `posttrain.data.quality.classifier`, once a process and again after its files change.

    Raises:
        UserError: the folder holds no such classifier.
    """
    return _load_linear_classifier(folder, file_state(folder))


@cache
def _load_linear_classifier(folder: str, state: str) -> "LinearClassifier":
    from posttrain.data.quality.classifier import load_classifier

    return load_classifier(Path(folder))


def locate_model(model: str, root: Path) -> str:
    """Resolves a language model's name as `posttrain.models.sources` does.

    Raises:
        UserError: it leads to no model.
    """
    from posttrain.models.sources import locate

    return locate(model, root)


def model_key(model: str) -> str:
    """Returns the key of a language model: the digest of its content; a Hub id or `tiny` is its own key."""
    source = locate_model(model, Path())
    # A Hub id is its own key: its content is not known before it is downloaded.
    return file_key(source) if Path(source).is_absolute() else source


def load_language_model(model: str, precision: Precision) -> "LanguageModel":
    """Loads a language model, once a process and again after its files change.

    Raises:
        UserError: it holds no causal language model.
    """
    source = locate_model(model, Path())
    return _load_language_model(source, precision, file_state(source))


@cache
def _load_language_model(source: str, precision: Precision, state: str) -> "LanguageModel":
    from posttrain.models.language_model import load_language_model
    from posttrain.models.sources import fetch
    from posttrain.models.task import TaskConfig

    if Path(source).is_dir():
        return load_language_model(Path(source), TaskConfig(), precision)
    # The weights are in memory once they are loaded, so that their files need not stay.
    with tempfile.TemporaryDirectory() as folder:
        fetch(source, Path(folder))
        return load_language_model(Path(folder), TaskConfig(), precision)


def embed_texts(name: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Embeds texts with the model that `posttrain.models.embedder` knows by ``name``, float32 [N, D]."""
    return np.asarray(_load_embedder(name).embed(list(texts)), np.float32)


@cache
def _load_embedder(name: str) -> Any:
    from posttrain.models.embedder import Embedder

    return Embedder.load(name)
