"""Hooks: runs a command and calls a webhook when the champion changes."""

import logging
import os
import shlex
import subprocess
from pathlib import Path

from pydantic import Field, field_validator

from posttrain.store.rows import Deployment
from posttrain.store.section import Section
from posttrain.store.webhook import check_webhook, post_json

log = logging.getLogger("posttrain")


class DeployConfig(Section):
    """Called after every promotion and rollback, and again by the next run if it failed."""

    command: str | None = Field(
        None, description="Command to run, with POSTTRAIN_CHAMPION, POSTTRAIN_MODEL, POSTTRAIN_ACTION set."
    )
    webhook: str | None = Field(None, description="URL that gets a JSON POST with model, action, round, path, reason.")
    timeout: float = Field(60.0, gt=0, description="Seconds that the command or the webhook may take.")

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
    # It must not fail the round: the model is deployed already, and the registry calls a failed hook again.
    return _command(config, deployment, champion, root) and _webhook(config, deployment, champion)


def _command(config: DeployConfig, deployment: Deployment, champion: Path, root: Path) -> bool:
    if not config.command:
        return True
    variables = {
        "POSTTRAIN_CHAMPION": str(champion),
        "POSTTRAIN_MODEL": deployment.model_id,
        "POSTTRAIN_ACTION": deployment.action,
    }
    try:
        process = subprocess.run(
            shlex.split(config.command),
            cwd=root,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=config.timeout,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.warning("deploy.command failed: %s", error)
        return False
    if process.returncode:
        log.warning("deploy.command exited with %d: %s", process.returncode, process.stderr.strip()[-200:])
    return process.returncode == 0


def _webhook(config: DeployConfig, deployment: Deployment, champion: Path) -> bool:
    if not config.webhook:
        return True
    body = {
        "model": deployment.model_id,
        "action": deployment.action,
        "round": deployment.round,
        "reason": deployment.reason,
        "path": str(champion),
    }
    if error := post_json(config.webhook, body, config.timeout):
        log.warning("deploy.webhook failed: %s", error)
    return error is None
