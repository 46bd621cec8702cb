"""The models of a workspace in Python: as ``posttrain models`` in a terminal."""

from pathlib import Path
from typing import Any

from posttrain.api import open_call
from posttrain.inspect.model_card import model_card
from posttrain.inspect.models import (
    check_repository,
    export_model,
    list_models,
    push_model,
)
from posttrain.loop.model_registry import ModelRegistry, find_model
from posttrain.store.logs import quiet_libraries
from posttrain.store.text_files import finite_json


class Models:
    """The models of a workspace, ``Workspace.models``.

    A model is named by ``champion``, the one in service, by its id or by the beginning of one.

    Args:
        path: the workspace's folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"Models({str(self._path)!r})"

    def list(self) -> list[dict[str, Any]]:
        """Returns all models, oldest first: the list that ``posttrain models list --json`` prints.

        Each has ``id``, ``round``, ``decision``, ``champion`` (whether it is in service), ``damage``, ``megabytes`` and
        ``metrics``.
        """
        with open_call(self._path, checked=False) as (store, _):
            rows: list[dict[str, Any]] = finite_json(list_models(store))
        return rows

    @property
    def champion(self) -> str | None:
        """The id of the model in service; None before round 0 has ended."""
        with open_call(self._path, checked=False) as (store, _):
            deployment = ModelRegistry(store).champion
        return deployment.model_id if deployment else None

    def promote(self, model: str, reason: str = "by hand") -> str:
        """Makes a model the champion, bypassing the gate; returns its id.

        Args:
            model: ``champion``, ``round 2`` or the beginning of its id.
            reason: kept in the registry.

        Raises:
            UserError: there is no such model, or its weights are NaN or infinite.
            DamagedArtifactError: its files are missing or damaged; nothing has changed.
        """
        with open_call(self._path, write=True, checked=False) as (store, config):
            registry = ModelRegistry(store, config.deploy)
            return registry.promote(find_model(store, model), round=None, reason=reason).model_id

    def rollback(self, to: str | None = None, reason: str = "by hand") -> str:
        """Puts an earlier champion back in service at once; returns its id.

        Without ``to`` the last promotion is undone, once: a second call finishes a rollback that was killed, and goes
        back no further. The command line asks before it goes back to the base model; this does not.

        Args:
            to: the earlier champion: ``round 2`` or a model's name.
            reason: kept in the registry.

        Raises:
            UserError: there is no earlier champion, or ``to`` was never one.
            DamagedArtifactError: its files are missing or damaged; nothing has changed.
        """
        with open_call(self._path, write=True, checked=False) as (store, config):
            target = None if to is None else find_model(store, to)
            return ModelRegistry(store, config.deploy).rollback(reason, to=target).target

    def load(self, model: str = "champion") -> tuple[Any, Any]:
        """Loads a model as transformers' own objects, ready to generate on the GPU if there is one.

        Prompt it as it was trained: with ``tokenizer.apply_chat_template`` and the config's ``task.system``.

        Args:
            model: ``champion``, ``round 2`` or the beginning of its id.

        Returns:
            The ``AutoModelForCausalLM`` and its tokenizer.

        Raises:
            UserError: there is no such model.
            DamagedArtifactError: its files are missing or damaged.
        """
        from posttrain.models.language_model import load_transformers

        quiet_libraries()
        with open_call(self._path, checked=False) as (store, _):
            folder = store.artifacts.path(find_model(store, model))
        return load_transformers(folder)

    def export(self, model: str, folder: str | Path, *, card: bool = False) -> Path:
        """Copies a model in Hugging Face layout into a new folder; returns its path.

        Args:
            model: ``champion``, ``round 2`` or the beginning of its id.
            folder: the folder to make.
            card: True to write a model card, ``README.md``, into it.

        Raises:
            UserError: there is no such model, or the folder exists.
        """
        with open_call(self._path, checked=False) as (store, config):
            id = find_model(store, model)
            export_model(store, id, Path(folder), model_card(store, config, id) if card else None)
        return Path(folder)

    def push(self, model: str, repository: str, *, private: bool = False, dry_run: str | Path | None = None) -> str:
        """Uploads a model to the Hugging Face Hub, with a card that states data, metrics, gate and lineage.

        The card holds counts, ids and metrics, and no text of a record.

        Args:
            model: ``champion``, ``round 2`` or the beginning of its id.
            repository: ``OWNER/NAME``; made if it is missing.
            private: True to make a repository that only its owner sees.
            dry_run: a new folder that gets what would be uploaded, without a network.

        Returns:
            The address of the upload; of a dry run its folder.

        Raises:
            UserError: there is no such model, nobody is signed in, or the Hub refuses or cannot be reached; before
                any work.
        """
        check_repository(repository)
        quiet_libraries()
        with open_call(self._path, write=dry_run is None, checked=False) as (store, config):
            id = find_model(store, model)
            if dry_run is None:
                return push_model(store, config, id, repository, private=private)
            export_model(store, id, Path(dry_run), model_card(store, config, id, repository))
        return str(dry_run)
