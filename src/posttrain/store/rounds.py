"""Queries on the rows of a loop: its rounds, its deployments and its canaries."""

from typing import Any

from sqlalchemy import ColumnElement, select

from posttrain.store.database import utc_now
from posttrain.store.journaled_database import JournaledDatabase
from posttrain.store.rows import Canary, Deployment, Round
from posttrain.store.tables import canaries, deployments, rounds

_ROUND_FIELDS = {column.name for column in rounds.columns} - {"arm", "number"}

_ROUND_COLUMNS = [column for column in rounds.columns if column.name != "arm"]

_CANARY_FIELDS = {column.name for column in canaries.columns} - {"arm", "id"}

_CANARY_COLUMNS = [column for column in canaries.columns if column.name != "arm"]

_DEPLOYMENT_COLUMNS = [column for column in deployments.columns if column.name != "arm"]


class RoundQueries(JournaledDatabase):
    """Rounds by number."""

    def open_round(self, number: int, champion_before: str | None) -> Round:
        """Begins a round, or returns it unchanged if it has begun."""
        row = {
            "arm": self.arm,
            "number": number,
            "status": "open",
            "champion_before": champion_before,
            "detail": {},
            "started_at": utc_now(),
        }
        with self.transaction():
            self.insert_new_row(rounds, row)
            return self._round(number)

    def update_round(self, number: int, **fields: Any) -> Round:
        """Sets fields of a round, such as ``status`` or ``decision``; ``done`` sets ``finished_at``.

        Raises:
            LookupError: there is no such round.
            TypeError: there is no such field.
        """
        if unknown := fields.keys() - _ROUND_FIELDS:
            raise TypeError(f"a round has no {', '.join(sorted(unknown))}")
        if fields.get("status") == "done":
            fields.setdefault("finished_at", utc_now())
        with self.transaction():
            if fields:
                self.update_rows(rounds, self._is_ours & (rounds.c.number == number), fields)
            return self._round(number)

    def round(self, number: int) -> Round | None:
        """Returns the round, or None."""
        return next((round for round in self.rounds() if round.number == number), None)

    def rounds(self) -> list[Round]:
        """Returns all rounds, first to last."""
        with self.reading() as connection:
            rows = connection.execute(select(*_ROUND_COLUMNS).where(self._is_ours).order_by(rounds.c.number)).mappings()
            return [Round(**row) for row in rows]

    def arms(self) -> list[str]:
        """Returns the names of all loops that have rounds; the main one is ""."""
        with self.reading() as connection:
            return list(connection.scalars(select(rounds.c.arm).distinct().order_by(rounds.c.arm)))

    @property
    def _is_ours(self) -> ColumnElement[bool]:
        return rounds.c.arm == self.arm

    def _round(self, number: int) -> Round:
        round = self.round(number)
        if round is None:
            raise LookupError(f"no round {number}")
        return round


class DeploymentQueries(JournaledDatabase):
    """Deployments, oldest first; the last one's model is the champion. Rows are only added, so history stays."""

    def add_deployment(
        self, model_id: str, *, round: int | None, action: str, reason: str = "", hook: str = "none"
    ) -> Deployment:
        """Records that a model becomes the champion; see `Deployment` for the values."""
        row = {
            "arm": self.arm,
            "model_id": model_id,
            "round": round,
            "action": action,
            "reason": reason,
            "created_at": utc_now(),
            "hook": hook,
        }
        with self.transaction():
            id = self.insert_row(deployments, row)["id"]
            return next(deployment for deployment in self.deployments() if deployment.id == id)

    def deployments(self) -> list[Deployment]:
        """Returns all deployments, oldest first."""
        with self.reading() as connection:
            ours = select(*_DEPLOYMENT_COLUMNS).where(deployments.c.arm == self.arm)
            rows = connection.execute(ours.order_by(deployments.c.id)).mappings()
            return [Deployment(**row) for row in rows]

    def set_hook(self, id: int, status: str) -> None:
        """Records the status of a deployment's command or webhook.

        Raises:
            LookupError: there is no such deployment.
        """
        if not self.update_rows(deployments, deployments.c.id == id, {"hook": status}):
            raise LookupError(f"no deployment {id}")


class CanaryQueries(JournaledDatabase):
    """Canaries, oldest first; at most the last one runs."""

    def add_canary(
        self, model_id: str, *, champion: Deployment, share: float, reason: str, detail: dict[str, Any], hook: str
    ) -> Canary:
        """Records that a model begins to take a share of the requests; see `Canary` for the values."""
        row = {
            "arm": self.arm,
            "model_id": model_id,
            "champion_id": champion.model_id,
            "deployment_id": champion.id,
            "share": share,
            "status": "running",
            "reason": reason,
            "detail": detail,
            "created_at": utc_now(),
            "hook": hook,
        }
        with self.transaction():
            id = self.insert_row(canaries, row)["id"]
            return next(canary for canary in self.canaries() if canary.id == id)

    def update_canary(self, id: int, **fields: Any) -> Canary:
        """Sets fields of a canary; a ``status`` other than ``running`` sets ``finished_at``.

        Raises:
            LookupError: there is no such canary.
            TypeError: there is no such field.
        """
        if unknown := fields.keys() - _CANARY_FIELDS:
            raise TypeError(f"a canary has no {', '.join(sorted(unknown))}")
        if fields.get("status", "running") != "running":
            fields.setdefault("finished_at", utc_now())
        with self.transaction():
            if not self.update_rows(canaries, canaries.c.id == id, fields):
                raise LookupError(f"no canary {id}")
            return next(canary for canary in self.canaries() if canary.id == id)

    def canaries(self) -> list[Canary]:
        """Returns all canaries, oldest first."""
        with self.reading() as connection:
            ours = select(*_CANARY_COLUMNS).where(canaries.c.arm == self.arm)
            return [Canary(**row) for row in connection.execute(ours.order_by(canaries.c.id)).mappings()]
