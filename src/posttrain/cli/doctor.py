"""``posttrain doctor``: checks the installation, the machine and a workspace."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import JsonOption, print_json, print_line
from posttrain.inspect.environment import Check, check_environment
from posttrain.store.config import CONFIG_FILE


def doctor(
    workspace: Annotated[
        Path | None,
        typer.Option("--workspace", "-w", help="Check this workspace too; by default the current folder if it is one."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check versions, devices, disks, optional parts, models and the workspace; say what to install or mend.

    Exits with 1 if a required part is broken.
    """
    here = Path()
    checks = list(check_environment(workspace or (here if (here / CONFIG_FILE).is_file() else None)))
    broken = [check for check in checks if check.state == "broken"]
    if json:
        print_json({"well": not broken, "checks": [check.to_json() for check in checks]})
    else:
        for check in checks:
            fix = f"; {check.fix}" if check.fix else ""
            print_line(f"{check.state:<8} {check.name}: {check.value}{fix}")
        print_line(_summary(checks, broken))
    if broken:
        raise typer.Exit(1)


def _summary(checks: list[Check], broken: list[Check]) -> str:
    if broken:
        return "mend: " + "; ".join(f"{check.name}: {check.fix}" for check in broken)
    missing = sum(check.state == "missing" for check in checks)
    optional = f"; {missing} optional parts are missing: install those whose use you need" if missing else ""
    return f"all well{optional}"
