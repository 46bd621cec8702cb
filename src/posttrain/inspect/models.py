"""Lists a workspace's models, finds one by its name, copies one to a folder, and pushes one to the Hub."""

import re
import shutil
from pathlib import Path
from typing import Any

from posttrain.inspect.champion import champion_problems
from posttrain.inspect.model_card import CARD, model_card
from posttrain.loop.config import Config
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.state import RoundState
from posttrain.models.loading import check_loadable
from posttrain.store.artifacts import MANIFEST
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, remove_tree, temporary_folder
from posttrain.store.hub import hub_errors
from posttrain.store.workspace import Workspace

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def list_models(workspace: Workspace) -> list[dict[str, Any]]:
    """Returns all models, oldest first.

    Each has ``id``, ``round`` (that trained it, or None), ``decision`` of the gate, ``champion`` (whether it is in
    service), ``damage`` (of the champion's files, a line each), ``megabytes``, and its round's ``metrics``.
    """
    champion = ModelRegistry(workspace).champion
    damage = champion_problems(workspace, champion.model_id) if champion else []
    candidates = {entry.candidate: entry for entry in workspace.metadata.rounds() if entry.candidate}
    rows: list[dict[str, Any]] = []
    for artifact in sorted(workspace.metadata.artifacts("model"), key=lambda row: row.created_at):
        # A model may be of no round: a base model that the config names since, for one.
        entry = candidates.get(artifact.id)
        state = RoundState.from_row(entry) if entry else RoundState()
        in_service = bool(champion and champion.model_id == artifact.id)
        rows.append(
            {
                "id": artifact.id,
                "round": entry.number if entry else None,
                "decision": state.action,
                "champion": in_service,
                "damage": damage if in_service else [],
                "megabytes": round(artifact.size / 1e6, 1),
                "metrics": state.metrics or {},
            }
        )
    return rows


def export_model(workspace: Workspace, model: str, folder: Path, card: str | None = None) -> None:
    """Copies a model in Hugging Face layout into a new folder.

    Args:
        workspace: The workspace.
        model: Id of the model.
        folder: The folder to make.
        card: Content of its ``README.md``; None for none.

    Raises:
        UserError: the folder exists, the disk refused, or the weights are not those of the config.
        DamagedArtifactError: the model is missing or damaged.
    """
    source = workspace.artifacts.path(model)
    if folder.exists():
        raise UserError("the folder exists already", where=str(folder), fix="remove it or name another")
    # Copied under another name and renamed, so that a killed export leaves no half model under the final name.
    partial = folder.with_name(f".{folder.name}.partial")
    with disk_errors(folder):
        remove_tree(partial)
        # By content alone: an artifact's files are read-only, and the copy is the user's own.
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(MANIFEST), copy_function=shutil.copyfile)
        check_loadable(partial)
        if card is not None:
            (partial / CARD).write_text(card, encoding="utf-8")
        partial.rename(folder)


def push_model(workspace: Workspace, config: Config, model: str, repository: str, *, private: bool = False) -> str:
    """Uploads a model with its card to the Hub; the repository is made if it is missing.

    Args:
        workspace: The workspace.
        config: Its config.
        model: Id of the model.
        repository: ``OWNER/NAME``.
        private: True for a repository that only its owner sees, if it is made now.

    Returns:
        The address of the upload.

    Raises:
        UserError: the name is wrong, nobody is signed in, or the Hub refuses or cannot be reached.
        DamagedArtifactError: the model is missing or damaged.
    """
    api = sign_in(repository)
    card = model_card(workspace, config, model, repository)
    with temporary_folder(workspace.home / "tmp") as folder:
        export_model(workspace, model, folder / "model", card)
        with hub_errors(repository, "model"):
            api.create_repo(repository, private=private, exist_ok=True)
            upload = api.upload_folder(
                repo_id=repository, folder_path=folder / "model", commit_message=f"Upload {model} by posttrain"
            )
    return str(upload.commit_url)


def sign_in(repository: str) -> Any:
    """Returns the Hub's client, after a request that shows that the token is right.

    Raises:
        UserError: ``repository`` is not ``OWNER/NAME``, nobody is signed in, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token

    check_repository(repository)
    api = HfApi()
    if get_token() is None:
        raise UserError("nobody is signed in to the Hub", where=repository, fix="hf auth login, or set HF_TOKEN")
    with hub_errors(repository, "model"):
        api.whoami()
    return api


def check_repository(repository: str) -> None:
    """Raises a UserError unless ``repository`` is ``OWNER/NAME``."""
    if not _REPOSITORY.fullmatch(repository):
        raise UserError("is not the name of a repository", where=repository, fix="write OWNER/NAME")
