"""Opens the models of a recipe: folders, the Hub, GGUF files, object stores, each with a LoRA adapter or without."""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path

from posttrain.merge.lora_adapter import ADAPTER_CONFIG, AdaptedModel, is_adapter, read_adapter_config
from posttrain.merge.recipe import Recipe
from posttrain.merge.sources import ModelFolder, WeightSource
from posttrain.models.sources import check_model_folder, fetch_once, hub_snapshot, locate
from posttrain.store.errors import StorageError, UserError
from posttrain.store.files import disk_errors
from posttrain.store.paths import locate_path
from posttrain.store.remote_files import open_file_system, remote_errors

# No pickles: loading one runs the code in it.
_FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")

Key = tuple[str, str | None]
"""A model and its adapter, as the recipe names them."""


def model_keys(recipe: Recipe) -> list[Key]:
    """Returns the models and bases of a recipe, each once."""
    keys: list[Key] = [(entry.model, entry.adapter) for entry in recipe.entries()]
    bases = [recipe.base, *(part.base for part in recipe.slices)]
    return list(dict.fromkeys([*keys, *((base, None) for base in bases if base)]))


def open_models(recipe: Recipe, root: Path, scratch: Path) -> dict[Key, WeightSource]:
    """Opens all models of a recipe.

    A path is first looked for; all that is wrong with one is reported before anything is downloaded.

    Args:
        recipe: the recipe.
        root: the folder that its paths are relative to.
        scratch: a folder for what is downloaded or converted.

    Raises:
        UserError: a model or adapter is missing or damaged.
    """
    opener = _Opener(root, scratch)
    keys = model_keys(recipe)
    for model, adapter in keys:
        opener.check(model, adapter)
    sources: dict[Key, WeightSource] = {}
    with ExitStack() as opened:
        for key in keys:
            sources[key] = opener.open(*key)
            opened.callback(sources[key].close)
        opened.pop_all()
    return sources


class _Opener:
    def __init__(self, root: Path, scratch: Path) -> None:
        self._root, self._scratch = root, scratch
        self._folders: dict[str, Path] = {}

    def check(self, model: str, adapter: str | None) -> None:
        """Raises a UserError if a path leads to no model or adapter."""
        model, adapter = self._split(model, adapter)
        self._locate(model)
        if adapter is not None and not _is_remote(adapter):
            folder = locate_path(self._root, adapter)
            if not (folder / ADAPTER_CONFIG).is_file() and (folder.exists() or not _looks_like_a_hub_id(adapter)):
                raise UserError(f"holds no {ADAPTER_CONFIG}", where=adapter, fix="name the folder of a LoRA adapter")

    def open(self, model: str, adapter: str | None) -> WeightSource:
        """Opens a model with its adapter."""
        model, adapter = self._split(model, adapter)
        folder = self._fetch(model)
        if adapter is not None:
            return self._adapted(f"{model}+{adapter}", model, self._fetch_adapter(adapter))
        if not is_adapter(folder):
            return ModelFolder(model, folder, self._location(model, folder))
        # An adapter alone says which model it is for.
        base = read_adapter_config(folder).get("base_model_name_or_path")
        if not base:
            raise UserError("is an adapter that names no base model", where=model, fix=f"write MODEL+{model}")
        try:
            return self._adapted(model, str(base), folder)
        except UserError as error:
            if error.where == "model":
                raise UserError(
                    f"is an adapter for `{base}`, which is not a model here", where=model, fix=f"write MODEL+{model}"
                ) from None
            raise

    def _split(self, model: str, adapter: str | None) -> tuple[str, str | None]:
        """Returns model and adapter, where a plus sign may also be a part of a folder's name."""
        whole = f"{model}+{adapter}" if adapter is not None else model
        if "+" not in whole or (not _is_remote(whole) and locate_path(self._root, whole).exists()):
            return whole, None
        model, _, adapter = whole.partition("+")
        return model, adapter

    def _adapted(self, name: str, model: str, adapter: Path) -> WeightSource:
        folder = self._fetch(model)
        base = ModelFolder(model, folder, self._location(model, folder))
        try:
            return AdaptedModel(name, adapter, base)
        except BaseException:
            base.close()
            raise

    def _fetch(self, model: str) -> Path:
        """Returns the folder of a model, downloaded or converted on the first call."""
        if model not in self._folders:
            self._folders[model] = self._fetched(model)
        return self._folders[model]

    def _fetched(self, model: str) -> Path:
        target = self._scratch / f"input-{len(self._folders)}"
        if _is_remote(model):
            download(model, target)
            if not is_adapter(target):
                check_model_folder(target)
            return target
        source = self._locate(model)
        if _looks_like_a_hub_id(source):
            # Read in the Hub's cache, without a copy.
            snapshot = hub_snapshot(source)
            if not is_adapter(snapshot):
                check_model_folder(snapshot)
            return snapshot
        return fetch_once(source, target)

    def _locate(self, model: str) -> str:
        if _is_remote(model):
            return model
        folder = locate_path(self._root, model)
        return str(folder.absolute()) if is_adapter(folder) else locate(model, self._root)

    def _fetch_adapter(self, adapter: str) -> Path:
        folder = locate_path(self._root, adapter) if not _is_remote(adapter) else None
        return folder if folder is not None and folder.is_dir() else self._fetch(adapter)

    def _location(self, model: str, folder: Path) -> str:
        return model if folder.is_relative_to(self._scratch) else str(folder)


def download(url: str, folder: Path) -> None:
    """Downloads a model's folder from an object store.

    Raises:
        UserError: it is empty or cannot be read, or the disk has too little space.
        WorkError: it cannot be reached.
    """
    files = open_file_system(url.partition("://")[0], url)
    with remote_errors(url, "the model", missing="check the address"), disk_errors(folder):
        root = str(files._strip_protocol(url)).rstrip("/")
        sizes = _listed(files.find(root, maxdepth=1, detail=True))
        if not sizes:
            raise UserError("holds no model", where=url, fix="name the folder that holds config.json")
        folder.mkdir(parents=True)
        free, needed = shutil.disk_usage(folder).free, sum(sizes.values())
        if free < needed:
            raise StorageError(
                f"{needed / 1e9:.1f} GB would be downloaded and {free / 1e9:.1f} GB are free",
                where=str(folder),
                fix="free some space and run the same command again",
            )
        for path, size in sizes.items():
            target = folder / path.rpartition("/")[2]
            files.get_file(path, str(target))
            if target.stat().st_size != size:
                raise UserError(f"{target.name} was changed while it was downloaded", where=url, fix="try it again")


def _listed(entries: Mapping[str, Mapping[str, object]]) -> dict[str, int]:
    names = {path: int(str(entry["size"])) for path, entry in entries.items() if entry.get("type") == "file"}
    return {path: size for path, size in names.items() if any(fnmatch(path.rpartition("/")[2], p) for p in _FETCHED)}


def _is_remote(name: str) -> bool:
    return "://" in name


def _looks_like_a_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "~", "/")) and not name.endswith(".gguf")
