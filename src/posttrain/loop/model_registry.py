"""The model registry: returns the champion, promotes a model and rolls back."""

from dataclasses import dataclass, field

from posttrain.loop.hooks import DeployConfig, call
from posttrain.models.loading import check_finite_files
from posttrain.store.errors import DamagedArtifactError, UserError, WorkError
from posttrain.store.rows import Deployment
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class Rollback:
    """A rollback.

    Attributes:
        source: Id of the model that it takes out of service.
        target: Id of the model that it restores.
        done: True if the target is in service already.
    """

    source: str
    target: str
    done: bool


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
            UserError: if there is no such model, or its weights are NaN or infinite.
            DamagedArtifactError: the model is missing or damaged; nothing has changed.
        """
        row = self.workspace.metadata.artifact(model_id)
        if row is None or row.kind != "model":
            raise UserError(f"`{model_id}` is no model of this workspace", fix="posttrain models list")
        with self.workspace.deploying():
            current = self.champion
            # Not twice: a round that was killed after this row promotes its model again.
            if current is None or current.model_id != model_id:
                # Older versions wrote such models.
                check_finite_files(self.workspace.artifacts.path(model_id))
                self._add(model_id, round, action, reason)
            self._sync()
            return self._require_champion()

    def rollback(self, reason: str = "", round: int | None = None, to: str | None = None) -> Rollback:
        """Puts an earlier champion back in service; a second call finishes what a kill left undone.

        Args:
            to: Model to restore; None for the one that `plan_rollback` derives.

        Raises:
            UserError: there is no earlier champion, or ``to`` was never one.
            DamagedArtifactError: the earlier champion is missing or damaged; nothing has changed.
        """
        with self.workspace.deploying():
            plan = self.plan_rollback(to)
            if not plan.done:
                self._add(plan.target, round, "rollback", reason)
            self._sync()
            return plan

    def plan_rollback(self, to: str | None = None) -> Rollback:
        """Determines what `rollback` would do.

        Without ``to`` the last promotion is undone. If a rollback was the last change, it is the same one, done: a
        command that was killed late, or typed twice, must not go back twice.

        Raises:
            UserError: there is no earlier champion, or ``to`` was never one.
        """
        deployments = self.workspace.metadata.deployments()
        earlier = self.earlier_champions()
        last = deployments[-1] if deployments else None
        if last and last.action == "rollback" and to in (None, last.model_id):
            # The row before names the source: a rollback's row follows that of the model which it replaced.
            return Rollback(deployments[-2].model_id, last.model_id, done=True)
        if last and to == last.model_id:
            return Rollback(to, to, done=True)
        if to is not None and all(entry.model_id != to for entry in deployments):
            raise UserError(f"`{to}` was never the champion", fix=f"posttrain models promote {to}")
        if last is None or not (to or earlier):
            raise UserError("there is no earlier champion to roll back to", fix="posttrain models list")
        return Rollback(last.model_id, to or earlier[0], done=False)

    def earlier_champions(self) -> list[str]:
        """Returns the champions before the present one, newest first, without those that rollbacks removed."""
        line: list[str] = []
        for deployment in self.workspace.metadata.deployments():
            model = deployment.model_id
            if deployment.action == "rollback" and model in line:
                # It removes all that came after the model that it restored.
                line = line[: len(line) - line[::-1].index(model)]
            elif not line or line[-1] != model:
                line.append(model)
        return [model for model in dict.fromkeys(reversed(line[:-1])) if model != line[-1]]

    def is_base(self, model_id: str) -> bool:
        """Returns True for the base model, which round 0 put in service untrained."""
        deployments = self.workspace.metadata.deployments()
        return any(entry.action == "baseline" and entry.model_id == model_id for entry in deployments)

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
        # Checked before the row: the registry must not name a model that the link cannot lead to.
        self.workspace.artifacts.path(model_id)
        # Stored as pending before it is called: a kill in between calls it again, so that it runs at least once.
        hook = "pending" if self.hooks.is_set else "none"
        self.workspace.metadata.add_deployment(model_id, round=round, action=action, reason=reason, hook=hook)

    def _sync(self) -> None:
        champion = self._require_champion()
        path = self.workspace.champion_path
        try:
            folder = self.workspace.artifacts.path(champion.model_id)
        except DamagedArtifactError as error:
            # After a rollback the command alone would repeat that one.
            option = " --to ROUND" if champion.action == "rollback" else ""
            fix = f"`posttrain models rollback{option}` restores the previous one"
            raise WorkError(f"the champion: {error}; {fix}") from None
        if not path.exists() or path.resolve() != folder.resolve():
            self.workspace.link_champion(champion.model_id)
        if champion.hook in ("pending", "failed") and self.hooks.is_set:
            succeeded = call(self.hooks, champion, path, self.workspace.root)
            self.workspace.metadata.set_hook(champion.id, "done" if succeeded else "failed")


def champion_before_round(workspace: Workspace, round: int) -> str:
    """Returns the model that a round's candidate has to beat: the champion, without what the round itself deployed."""
    # A round killed after its deployment decides again: its candidate must not be compared with itself.
    return [entry for entry in workspace.metadata.deployments() if entry.round != round][-1].model_id
