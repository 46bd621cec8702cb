"""Fetches datasets of the Hugging Face Hub: ``hub:OWNER/NAME``, with a configuration and a split."""

import re
from pathlib import Path, PurePosixPath

from posttrain.data.reading.rows import join_names
from posttrain.store.errors import UserError, suggest
from posttrain.store.hub import HUB_PREFIX, UnreachableHubError, hub_errors

_REVISION = "refs/convert/parquet"
"""The branch in which the Hub keeps every public dataset as Parquet, one folder ``CONFIGURATION/SPLIT`` each."""

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(/(?P<config>[^/:]+))?(:(?P<split>[^/:]+))?")
_FORM = "hub:OWNER/NAME, hub:OWNER/NAME:SPLIT or hub:OWNER/NAME/CONFIGURATION:SPLIT"


def fetch_hub_dataset(name: str) -> list[Path]:
    """Downloads a split of a dataset into the Hub's cache, and returns its Parquet files, in order.

    Args:
        name: ``hub:OWNER/NAME``, with ``/CONFIGURATION`` if the dataset has several, and ``:SPLIT`` (``train`` by
            default). Without a network, the split is read from the cache if an earlier call has downloaded it.

    Raises:
        UserError: the name is wrong, the Hub has no such dataset, configuration or split, or cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download

    match = _NAME.fullmatch(name.removeprefix(HUB_PREFIX))
    if match is None:
        raise UserError("is not the name of a dataset on the Hub", where=name, fix=f"write {_FORM}")
    repo, config, split = match["repo"], match["config"], match["split"] or "train"
    try:
        with hub_errors(name, "dataset"):
            files = HfApi().list_repo_files(repo, repo_type="dataset", revision=_REVISION)
            config = _find_split(files, name, repo, config, split)
            pattern = f"{config}/{split}/*.parquet"
            folder = snapshot_download(repo, repo_type="dataset", revision=_REVISION, allow_patterns=pattern)
    except UnreachableHubError as error:
        cached = _cached(repo, f"{config or '*'}/{split}/*.parquet")
        if cached is None:
            fix = "check the network, or download its files elsewhere, and name them"
            raise UnreachableHubError(error.what, where=name, fix=fix) from None
        folder = cached
        files = [file.relative_to(folder).as_posix() for file in Path(folder).glob("*/*/*.parquet")]
        config = _find_split(files, name, repo, config, split)
    # In the order of their names, which are numbers: records count in this order.
    return sorted((Path(folder) / config / split).glob("*.parquet"))


def _cached(repo: str, pattern: str) -> str | None:
    """Returns the folder in which the files of a pattern were downloaded earlier; None if one of them is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(
            repo, repo_type="dataset", revision=_REVISION, allow_patterns=pattern, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None


def _find_split(files: list[str], name: str, repo: str, config: str | None, split: str) -> str:
    """Returns the configuration that holds the split: the only one if none is named.

    Raises:
        UserError: there is no such configuration or split, or several configurations and none is named.
    """
    parts = sorted({file.parts[:2] for file in map(PurePosixPath, files) if file.suffix == ".parquet"})
    configs = list(dict.fromkeys(part[0] for part in parts))
    if config is None and len(configs) > 1:
        fix = f"name one of them, such as {HUB_PREFIX}{repo}/{configs[0]}:{split}"
        raise UserError(f"has the configurations {join_names(configs)}", where=name, fix=fix)
    config = config or (configs[0] if configs else "default")
    if config not in configs:
        raise UserError(f"has no configuration `{config}`", where=name, fix=suggest(config, configs))
    splits = [part[1] for part in parts if part[0] == config]
    if split not in splits:
        raise UserError(f"has no split `{split}`", where=name, fix=f"one of {join_names(splits)}")
    return config
