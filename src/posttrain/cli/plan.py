"""``posttrain plan``: what a training takes, before anything is downloaded or loaded."""

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, console, print_json, print_table
from posttrain.cli.train_options import (
    ConfigOption,
    DataOption,
    ModelOption,
    ObjectiveOption,
    SetOption,
    read_records,
    read_settings,
)
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption
from posttrain.models.sources import locate

_GIB = 2**30


def plan(
    model: ModelOption = None,
    data: DataOption = None,
    objective: ObjectiveOption = None,
    config: ConfigOption = None,
    set: SetOption = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it what is here.")] = None,
    device_memory: Annotated[
        float | None, typer.Option(min=0.001, help="Its memory in GiB, for another machine than this one.")
    ] = None,
    peak: Annotated[
        float | None, typer.Option(min=0.001, help="Its TFLOP/s in matrix products; without it they are measured.")
    ] = None,
    mfu: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of that peak which training reaches.")] = 0.3,
    json: JsonOption = False,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Estimate memory, micro-batch and time of a training from the model's config alone."""
    settings = read_settings(config, {"model": model, "data": data, "train.objective": objective}, set or [], plan=True)
    source = locate(settings.model, Path(), weights=False)
    from posttrain.train.plan import Machine, plan_training

    machine = Machine.of(device, None if device_memory is None else int(device_memory * _GIB), peak, mfu)
    records = read_records(settings, workspace).records if settings.data else None
    found = plan_training(settings, source, records, machine)
    if json:
        print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    _line(f"{found['model']}: {found['family']}, {_count(found['parameters']['all'])} parameters")
    kinds = [[kind, _count(count)] for kind, count in found["parameters"].items() if count]
    print_table("", ["weights", "numbers"], kinds)
    _line("")
    memory = found["memory"]
    print_table(
        f"at the peak ({memory['phase']})", ["part", "GiB"], [[k, v / _GIB] for k, v in memory["parts"].items()]
    )
    there = memory["available"]
    fits = "" if there is None else f" of {there / _GIB:.2f} GiB: {'fits' if memory['fits'] else 'DOES NOT FIT'}"
    _line(f"together {memory['total'] / _GIB:.2f}{fits} ({found['device']})")
    if memory["host"]:
        _line(f"and {memory['host'] / _GIB:.2f} GiB of the host's memory")
    if memory["stage"] is not None:
        _line(f"of {len(memory['stages'])} stages, train.stages.{memory['stage']} needs the most")
    for mix in found["mixes"]:
        rows = [[name, one["records"], one["met"], f"{one['epochs']:.2f}"] for name, one in mix["kinds"].items()]
        print_table(f"mix of train.stages.{mix['stage']}", [mix["by"], "records", "met", "epochs"], rows)
    batch, work = found["micro_batch"], found["work"]
    chosen = "" if batch["auto"] is None else f"; train.micro_batch_tokens=auto takes {batch['auto']}"
    _line(f"micro-batch: {batch['tokens']} tokens, {batch['supervised']} of them supervised{chosen}")
    _line(
        f"a step: {work['tokens']:.0f} tokens, {work['flops'] / 1e12:.3g} TFLOP, {work['seconds']:.3g} s at"
        f" {work['mfu']:.0%} of {work['peak'] / 1e12:.3g} TFLOP/s"
    )
    if work["steps"]:
        _line(f"{work['steps']} steps, {work['steps'] * work['seconds'] / 3600:.2f} h")


def _count(number: int) -> str:
    return f"{number:,}"


def _line(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
