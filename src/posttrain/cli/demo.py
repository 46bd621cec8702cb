"""``posttrain demo``: run the whole loop on the bundled task."""

import time
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import print_line
from posttrain.cli.status import print_rounds
from posttrain.cli.workspace import open_workspace


def demo(
    dir: Annotated[Path, typer.Option("--dir", help="The demo's workspace.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model; about a minute.")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Your own labelled file in place of the bundled task.")
    ] = None,
) -> None:
    """Run the whole loop on a bundled task: label a few records, train, deploy only a better model."""
    from posttrain.demo.workspace import prepare_workspace
    from posttrain.loop.loop import Loop
    from posttrain.web.report import write_report
    from posttrain.web.report_reader import read_report

    start = time.monotonic()
    prepare_workspace(dir, quick=quick, data=data)
    with open_workspace(dir, write=True) as (store, config):
        waiting = Loop(store, config).run()
        print_rounds(store, config)
        report = dir / "report.html"
        write_report(read_report(store, config), report)
    lines = [
        f"waiting for {waiting}" if waiting else f"done in {time.monotonic() - start:.0f} s",
        f"report: {report}",
        f"champion: {dir}/.posttrain/champion (Hugging Face layout)",
        f"next: posttrain show champion -w {dir}   posttrain status -w {dir}   posttrain data list -w {dir}",
    ]
    print_line("\n".join(lines))
