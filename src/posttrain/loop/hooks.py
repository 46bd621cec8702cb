"""Hooks: runs a command and calls a webhook when the champion changes."""

import logging
import shlex
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from posttrain.jobs.process import run_command
from posttrain.store.rows import Canary, Deployment
from posttrain.store.section import Section
from posttrain.store.webhook import check_webhook, post_json

log = logging.getLogger("posttrain")


class CanaryConfig(Section):
    """The test that ends a canary (`posttrain models promote MODEL --canary 10%`)."""

    alpha: float = Field(0.05, gt=0, lt=1, description="Greatest probability of a wrong decision, at whatever time.")
    margin: float = Field(
        0.05, gt=0, lt=1, description="Least loss in the share of good outcomes that is worth noticing."
    )
    min_outcomes: int = Field(30, ge=0, description="Outcomes of each arm before which nothing is decided.")
    max_outcomes: int = Field(
        50_000, ge=1, description="Outcomes of both arms after which an undecided canary ends, and the champion stays."
    )
    days: float = Field(14.0, gt=0, description="Days after which it does so.")


class DeployConfig(Section):
    """Called after every promotion and rollback and when a canary starts or ends; a call that failed is repeated."""

    command: str | None = Field(
        None, description="Command to run, with POSTTRAIN_CHAMPION, POSTTRAIN_MODEL, POSTTRAIN_ACTION set."
    )
    webhook: str | None = Field(None, description="URL that gets a JSON POST with model, action, round, path, reason.")
    timeout: float = Field(60.0, gt=0, description="Seconds that the command or the webhook may take.")
    canary: CanaryConfig = Field(CanaryConfig(), description="The test that promotes a canary or rolls it back.")

    @field_validator("webhook")
    @classmethod
    def _is_a_web_address(cls, webhook: str | None) -> str | None:
        return check_webhook(webhook)

    @property
    def is_set(self) -> bool:
        """Returns True if a command or a webhook is configured."""
        return bool(self.command or self.webhook)


def call(config: DeployConfig, deployment: Deployment, champion: Path, root: Path) -> bool:
    """Runs the command, then calls the webhook; returns True if both succeeded. A failure is only logged."""
    variables = {
        "POSTTRAIN_CHAMPION": str(champion),
        "POSTTRAIN_MODEL": deployment.model_id,
        "POSTTRAIN_ACTION": deployment.action,
    }
    body = {
        "model": deployment.model_id,
        "action": deployment.action,
        "round": deployment.round,
        "reason": deployment.reason,
        "path": str(champion),
    }
    return _call(config, variables, body, root)


def call_canary(
    config: DeployConfig, canary: Canary, champion_id: str, champion: Path, split: Path, arms: list[Any], root: Path
) -> bool:
    """Calls the same when a canary starts or ends; the action is ``canary`` or ``canary_STATUS``.

    Args:
        champion_id: Model in service now.
        champion: Path of its link.
        split: Path of the file that says how requests are split, which is gone after the end.
        arms: The arms in this file; none after the end.
    """
    action = "canary" if canary.status == "running" else f"canary_{canary.status}"
    # The champion's model and path, as at each call: a server that knows no canary must not put one in service.
    variables = {
        "POSTTRAIN_CHAMPION": str(champion),
        "POSTTRAIN_MODEL": champion_id,
        "POSTTRAIN_ACTION": action,
        "POSTTRAIN_CANARY": str(split),
    }
    body = {
        "model": champion_id,
        "action": action,
        "round": None,
        "reason": canary.conclusion or canary.reason,
        "path": str(champion),
        "canary": {"name": canary.name, "model": canary.model_id, "split": str(split)},
        "arms": arms,
    }
    return _call(config, variables, body, root)


def _call(config: DeployConfig, variables: dict[str, str], body: dict[str, Any], root: Path) -> bool:
    # It must not fail the round: the model is deployed already, and the registry calls a failed hook again.
    return _command(config, variables, root) and _webhook(config, body)


def _command(config: DeployConfig, variables: dict[str, str], root: Path) -> bool:
    if not config.command:
        return True
    try:
        ended = run_command(
            shlex.split(config.command), folder=str(root), environment=variables, seconds=config.timeout
        )
    except (OSError, ValueError) as error:
        log.warning("deploy.command failed: %s", error)
        return False
    if ended.code is None:
        log.warning("deploy.command failed: it did not end within %g seconds", config.timeout)
    elif ended.code:
        errors = ended.errors.decode(errors="replace").strip()
        log.warning("deploy.command exited with %d: %s", ended.code, errors[-200:])
    return ended.code == 0


def _webhook(config: DeployConfig, body: dict[str, Any]) -> bool:
    if not config.webhook:
        return True
    if error := post_json(config.webhook, body, config.timeout):
        log.warning("deploy.webhook failed: %s", error)
    return error is None
