"""The model registry: returns the champion, promotes a model and rolls back."""

from dataclasses import dataclass, field

from posttrain.loop.hooks import DeployConfig, call
from posttrain.store.errors import DamagedArtifactError, UserError, WorkError
from posttrain.store.rows import Deployment
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class ModelRegistry:
    """Deployments of a workspace; the last one's model is the champion."""

    workspace: Workspace
    hooks: DeployConfig = field(default_factory=DeployConfig)

    @property
    def champion(self) -> Deployment | None:
        """Returns the champion's deployment, or None before round 0 has ended."""
        deployments = self.workspace.metadata.deployments()
        return deployments[-1] if deployments else None

    @property
    def champion_id(self) -> str:
        """Returns the champion's model; there is one once round 0 is done."""
        return self._require_champion().model_id

    def promote(self, model_id: str, *, round: int | None, action: str = "promote", reason: str = "") -> Deployment:
        """Makes a model the champion.

        Raises:
            UserError: if there is no such model.
        """
        row = self.workspace.metadata.artifact(model_id)
        if row is None or row.kind != "model":
            raise UserError(f"`{model_id}` is no model of this workspace", fix="posttrain models list")
        with self.workspace.deploying():
            current = self.champion
            # Not twice: a round that was killed after this row promotes its model again.
            if current is None or current.model_id != model_id:
                self._add(model_id, round, action, reason)
            self._sync()
            return self._require_champion()

    def rollback(self, reason: str = "", round: int | None = None) -> Deployment:
        """Puts the champion before the present one back in service.

        Raises:
            UserError: if there is none.
        """
        with self.workspace.deploying():
            previous = self.previous()
            if previous is None:
                raise UserError("there is no earlier champion to roll back to", fix="posttrain models list")
            self._add(previous, round, "rollback", reason)
            self._sync()
            return self._require_champion()

    def previous(self) -> str | None:
        """Returns the champion before this one, which a rollback restores; None if there is none."""
        line: list[str] = []
        for deployment in self.workspace.metadata.deployments():
            # A rollback removes what it undid: two in a row lead two champions back, not there and back again.
            if deployment.action == "rollback" and len(line) > 1:
                line.pop()
            elif not line or line[-1] != deployment.model_id:
                line.append(deployment.model_id)
        return line[-2] if len(line) > 1 else None

    def sync(self) -> None:
        """Brings the champion's link and the hook in line with the registry.

        Every run starts with it: a kill after the registry's row and before the link or the hook leaves them behind.

        Raises:
            WorkError: the champion is missing or damaged.
        """
        if self.champion is not None:
            with self.workspace.deploying():
                self._sync()

    def _require_champion(self) -> Deployment:
        champion = self.champion
        assert champion is not None, "round 0 deploys the base model"
        return champion

    def _add(self, model_id: str, round: int | None, action: str, reason: str) -> None:
        # Stored as pending before it is called: a kill in between calls it again, so that it runs at least once.
        hook = "pending" if self.hooks.is_set else "none"
        self.workspace.metadata.add_deployment(model_id, round=round, action=action, reason=reason, hook=hook)

    def _sync(self) -> None:
        champion = self._require_champion()
        path = self.workspace.champion_path
        try:
            folder = self.workspace.artifacts.path(champion.model_id)
        except DamagedArtifactError as error:
            raise WorkError(f"the champion: {error}; `posttrain models rollback` restores the previous one") from None
        if not path.exists() or path.resolve() != folder.resolve():
            self.workspace.link_champion(champion.model_id)
        if champion.hook in ("pending", "failed") and self.hooks.is_set:
            succeeded = call(self.hooks, champion, path, self.workspace.root)
            self.workspace.metadata.set_hook(champion.id, "done" if succeeded else "failed")


def champion_before_round(workspace: Workspace, round: int) -> str:
    """Returns the model that a round's candidate has to beat: the champion, without what the round itself deployed."""
    # A round killed after its deployment decides again: its candidate must not be compared with itself.
    return [entry for entry in workspace.metadata.deployments() if entry.round != round][-1].model_id
