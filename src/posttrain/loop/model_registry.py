"""The model registry: returns the champion, promotes a model, at once or as a canary, and rolls back."""

import logging
from dataclasses import dataclass, field
from typing import Any

from posttrain.loop.hooks import DeployConfig, call, call_canary
from posttrain.loop.traffic_split import remove_split, split_path, write_split
from posttrain.models.loading import check_finite_files
from posttrain.store.errors import DamagedArtifactError, UserError, WorkError
from posttrain.store.rows import Canary, Deployment
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Rollback:
    """A rollback.

    Attributes:
        source: Id of the model that it takes out of service.
        target: Id of the model that it restores.
        done: True if the target is in service already.
        ends_canary: True if the source is a canary, and the target the champion, which stays.
    """

    source: str
    target: str
    done: bool
    ends_canary: bool = False


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
        self._check_model(model_id)
        with self.workspace.deploying():
            current = self.champion
            # Not twice: a round that was killed after this row promotes its model again.
            if current is None or current.model_id != model_id:
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
            running = self.running_canary
            if plan.ends_canary and running is not None:
                self.workspace.metadata.update_canary(running.id, **self._ending("rolled_back", reason))
            elif not plan.done:
                self._add(plan.target, round, "rollback", reason)
            self._sync()
            return plan

    def plan_rollback(self, to: str | None = None) -> Rollback:
        """Determines what `rollback` would do.

        Without ``to`` the last promotion is undone. If a rollback was the last change, it is the same one, done: a
        command that was killed late, or typed twice, must not go back twice. The start of a canary is a promotion,
        too: while one runs, and once it was rolled back, the champion stays.

        Raises:
            UserError: there is no earlier champion, or ``to`` was never one.
        """
        deployments = self.workspace.metadata.deployments()
        earlier = self.earlier_champions()
        last = deployments[-1] if deployments else None
        canary = self.last_canary
        if to is None and canary and last and canary.deployment_id == last.id:
            if canary.status == "running":
                return Rollback(canary.model_id, last.model_id, done=False, ends_canary=True)
            if canary.status == "rolled_back":
                return Rollback(canary.model_id, last.model_id, done=True, ends_canary=True)
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

    @property
    def last_canary(self) -> Canary | None:
        """Returns the canary that runs, or the last one that ran; None before the first."""
        canaries = self.workspace.metadata.canaries()
        return canaries[-1] if canaries else None

    @property
    def running_canary(self) -> Canary | None:
        """Returns the canary that runs, or None."""
        canary = self.last_canary
        return canary if canary and canary.status == "running" else None

    def start_canary(self, model_id: str, share: float, *, reason: str = "", detail: dict[str, Any]) -> Canary:
        """Lets a model take a share of the requests beside the champion.

        Args:
            share: Share of the requests, above 0 and below 1.
            detail: First numbers of the canary, see `posttrain.loop.canary`.

        Raises:
            UserError: there is no such model or no champion, the model is the champion, its weights are NaN or
                infinite, or a canary runs.
            DamagedArtifactError: one of the two models is missing or damaged; nothing has changed.
        """
        self._check_model(model_id)
        with self.workspace.deploying():
            champion, running = self.champion, self.running_canary
            if champion is None:
                raise UserError("there is no champion to compare a canary with yet", fix="posttrain run")
            if champion.model_id == model_id:
                raise UserError(f"`{model_id}` is the champion already", fix="name another model")
            if running is not None:
                what = f"{running.name} runs already, with {running.model_id}"
                raise UserError(what, fix="posttrain models canary --stop")
            check_finite_files(self.workspace.artifacts.path(model_id))
            self.workspace.artifacts.path(champion.model_id)
            canary = self.workspace.metadata.add_canary(
                model_id, champion=champion, share=share, reason=reason, detail=detail, hook=self._hook
            )
            self._sync()
            return canary

    def end_canary(self, id: int, status: str, conclusion: str, detail: dict[str, Any] | None = None) -> Canary:
        """Ends a canary, and makes its model the champion if the status is ``promoted``; returns its row.

        A canary that has ended meanwhile stays as it is.

        Args:
            status: ``promoted``, ``rolled_back``, ``kept`` or ``stopped``; see `posttrain.store.rows.Canary`.
            conclusion: Reason of the end.
            detail: The last numbers; None to leave those that are there.

        Raises:
            DamagedArtifactError: the model to promote is missing or damaged; nothing has changed.
        """
        metadata = self.workspace.metadata
        with self.workspace.deploying():
            canary = next(row for row in metadata.canaries() if row.id == id)
            if canary.status == "running":
                with metadata.transaction():
                    numbers = {} if detail is None else {"detail": detail}
                    metadata.update_canary(id, **self._ending(status, conclusion), **numbers)
                    if status == "promoted":
                        self._add(canary.model_id, None, "promote", conclusion)
            self._sync()
            return next(row for row in metadata.canaries() if row.id == id)

    def _check_model(self, model_id: str) -> None:
        row = self.workspace.metadata.artifact(model_id)
        if row is None or row.kind != "model":
            raise UserError(f"`{model_id}` is not a model of this workspace", fix="posttrain models list")

    @property
    def _hook(self) -> str:
        # Stored as pending before it is called: a kill in between calls it again, so that it runs at least once.
        return "pending" if self.hooks.is_set else "none"

    def _ending(self, status: str, conclusion: str) -> dict[str, Any]:
        return {"status": status, "conclusion": conclusion, "hook": self._hook}

    def _require_champion(self) -> Deployment:
        champion = self.champion
        assert champion is not None, "round 0 deploys the base model"
        return champion

    def _add(self, model_id: str, round: int | None, action: str, reason: str) -> None:
        # Checked before the row: the registry must not name a model that the link cannot lead to.
        self.workspace.artifacts.path(model_id)
        metadata, canary = self.workspace.metadata, self.running_canary
        with metadata.transaction():
            metadata.add_deployment(model_id, round=round, action=action, reason=reason, hook=self._hook)
            if canary is None:
                return
            # Its outcomes were compared with another champion.
            if canary.model_id == model_id:
                metadata.update_canary(canary.id, **self._ending("promoted", reason))
            else:
                metadata.update_canary(canary.id, **self._ending("stopped", f"{model_id} became the champion"))
        log.info("%s ended: %s", canary.name, metadata.canaries()[-1].conclusion)

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
        # Before any hook: a server that reads the split when it is called must read that of today.
        arms = self._sync_split()
        canary = self.last_canary
        root = self.workspace.root
        if champion.hook in ("pending", "failed") and self.hooks.is_set:
            succeeded = call(self.hooks, champion, path, root)
            self.workspace.metadata.set_hook(champion.id, "done" if succeeded else "failed")
        if canary is not None and canary.hook in ("pending", "failed") and self.hooks.is_set:
            split = split_path(self.workspace)
            succeeded = call_canary(self.hooks, canary, champion.model_id, path, split, arms, root)
            self.workspace.metadata.update_canary(canary.id, hook="done" if succeeded else "failed")

    def _sync_split(self) -> list[Any]:
        """Brings the file that splits the requests in line with the last canary's row; returns its arms."""
        canary = self.running_canary
        if canary is not None:
            try:
                return write_split(self.workspace, canary)
            except DamagedArtifactError as error:
                self.workspace.metadata.update_canary(canary.id, **self._ending("stopped", str(error)))
                log.warning("%s ended: %s", canary.name, error)
        remove_split(self.workspace)
        return []


def champion_before_round(workspace: Workspace, round: int) -> str:
    """Returns the model that a round's candidate has to beat: the champion, without what the round itself deployed."""
    # A round killed after its deployment decides again: its candidate must not be compared with itself.
    return [entry for entry in workspace.metadata.deployments() if entry.round != round][-1].model_id


def find_model(workspace: Workspace, text: str) -> str:
    """Returns the id of the model that ``champion``, ``round 2``, ``2``, an id or the beginning of one names.

    Raises:
        UserError: there is none.
    """
    champion = ModelRegistry(workspace).champion
    if text == "champion" and champion is not None:
        return champion.model_id
    number = text.removeprefix("round").strip()
    if number.isascii() and number.isdigit():
        model = {str(row.number): row.candidate for row in workspace.metadata.rounds()}.get(number)
        if model is None:
            raise UserError(f"round {number} trained no model", fix="posttrain models list")
        return model
    id = workspace.metadata.resolve(text)
    row = workspace.metadata.artifact(id)
    if row is None or row.kind != "model":
        raise UserError(f"`{text}` is not a model", fix="posttrain models list")
    return id
