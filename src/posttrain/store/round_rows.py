"""Rounds of the loop, and the deployments they ended in."""

from typing import Any

from sqlalchemy import ColumnElement, insert, select, update

from posttrain.store.clock import now
from posttrain.store.database import Database, insert_new
from posttrain.store.records import Deployment, Round
from posttrain.store.tables import deployments, rounds

_FIELDS = {column.name for column in rounds.columns} - {"arm", "number"}
_ROUND = [column for column in rounds.columns if column.name != "arm"]
_DEPLOYMENT = [column for column in deployments.columns if column.name != "arm"]


class RoundRows(Database):
    """Rounds by number."""

    def open_round(self, number: int, champion_before: str | None) -> Round:
        """Begin a round; one that has begun is returned as it stands."""
        row = {
            "arm": self.arm,
            "number": number,
            "status": "open",
            "champion_before": champion_before,
            "detail": {},
            "started_at": now(),
        }
        with self.transaction() as connection:
            insert_new(connection, rounds, row)
            return self._round(number)

    def update_round(self, number: int, **fields: Any) -> Round:
        """Set fields of a round, such as ``status`` or ``decision``; ``done`` sets ``finished_at``.

        Raises:
            LookupError: there is no such round.
            TypeError: there is no such field.
        """
        if unknown := fields.keys() - _FIELDS:
            raise TypeError(f"a round has no {', '.join(sorted(unknown))}")
        if fields.get("status") == "done":
            fields.setdefault("finished_at", now())
        with self.transaction() as connection:
            if fields:
                connection.execute(update(rounds).where(self._is_ours, rounds.c.number == number).values(fields))
            return self._round(number)

    def round(self, number: int) -> Round | None:
        """The round, or None."""
        return next((round for round in self.rounds() if round.number == number), None)

    def rounds(self) -> list[Round]:
        """All rounds, first to last."""
        with self.reading() as connection:
            rows = connection.execute(select(*_ROUND).where(self._is_ours).order_by(rounds.c.number)).mappings()
            return [Round(**row) for row in rows]

    @property
    def _is_ours(self) -> ColumnElement[bool]:
        return rounds.c.arm == self.arm

    def _round(self, number: int) -> Round:
        found = self.round(number)
        if found is None:
            raise LookupError(f"no round {number}")
        return found


class DeploymentRows(Database):
    """Deployments, oldest first; the last one's model is the champion."""

    def add_deployment(
        self, model_id: str, *, round: int | None, action: str, reason: str = "", hook: str = "none"
    ) -> Deployment:
        """Record that a model becomes the champion; see `Deployment` for the values."""
        row = {
            "arm": self.arm,
            "model_id": model_id,
            "round": round,
            "action": action,
            "reason": reason,
            "created_at": now(),
            "hook": hook,
        }
        with self.transaction() as connection:
            id = connection.scalar(insert(deployments).values(row).returning(deployments.c.id))
            return next(deployment for deployment in self.deployments() if deployment.id == id)

    def deployments(self) -> list[Deployment]:
        """All deployments, oldest first."""
        with self.reading() as connection:
            ours = select(*_DEPLOYMENT).where(deployments.c.arm == self.arm)
            rows = connection.execute(ours.order_by(deployments.c.id)).mappings()
            return [Deployment(**row) for row in rows]

    def set_hook(self, id: int, status: str) -> None:
        """Record where the user's command or webhook of a deployment stands.

        Raises:
            LookupError: there is no such deployment.
        """
        with self.transaction() as connection:
            if not connection.execute(update(deployments).where(deployments.c.id == id).values(hook=status)).rowcount:
                raise LookupError(f"no deployment {id}")
