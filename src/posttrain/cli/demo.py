"""``posttrain demo``: the whole loop on a bundled task."""

import time
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.shared import console, opened
from posttrain.cli.status import print_rounds


def demo(
    dir: Annotated[Path, typer.Option("--dir", help="The demo's workspace.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model; about a minute.")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Your own labelled file in place of the bundled task.")
    ] = None,
) -> None:
    """The whole loop on a bundled task: label a little, train, deploy only what is better."""
    from posttrain.demo.workspace import prepare
    from posttrain.loop.loop import Loop
    from posttrain.web.gather import gather
    from posttrain.web.report import write

    start = time.monotonic()
    prepare(dir, quick=quick, data=data)
    with opened(dir, write=True) as (store, config):
        waiting = Loop(store, config).run()
        print_rounds(store, config)
        report = dir / "report.html"
        write(gather(store, config), report)
    lines = [
        f"waiting for {waiting}" if waiting else f"done in {time.monotonic() - start:.0f} s",
        f"report: {report}",
        f"champion: {dir}/.posttrain/champion (Hugging Face layout)",
        f"next: posttrain show champion -w {dir}   posttrain status -w {dir}   posttrain data list -w {dir}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(demo)
