"""Weights & Biases."""

import os
from collections.abc import Mapping, Sequence

from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.train.watch.findings import Decision
from posttrain.train.watch.sinks.base import first_line, optional
from posttrain.train.watch.values import StepValues

_WHERE = "train.sinks.wandb"
_SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WeightsAndBiases:
    """The values of each step, and nothing else of the machine: no code, no console output, no list of packages, no
    system metrics.

    A run of the same name in the project is gone on with.

    Raises:
        UserError: wandb is not installed, or refuses (such as without an account).
    """

    def __init__(self, project: str, run: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        library = optional("wandb", "wandb", _WHERE)
        settings = library.Settings(**_SETTINGS)
        try:
            self._run = library.init(project=project, name=run, id=digest(run)[:16], resume="allow", settings=settings)
        except library.Error as error:
            raise UserError(first_line(error), where=_WHERE, fix="see `wandb login`") from None
        # An axis of its own: the library drops what is logged for a step before the last, as after a rollback.
        self._run.define_metric("*", step_metric="step")

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        lines = {"decisions": "; ".join(decision.line() for decision in decisions)} if decisions else {}
        self._run.log({"step": values.step, **values.numbers(), **lines})

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        """Nothing: what was logged stays, and what follows is drawn over it."""

    def close(self) -> None:
        self._run.finish()
