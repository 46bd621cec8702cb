"""``posttrain plan``: estimates a training before anything is downloaded or loaded."""

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.train_options import (
    ConfigOption,
    DataOption,
    ModelOption,
    ObjectiveOption,
    SetOption,
    read_records,
    read_settings,
)
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store
from posttrain.models.sources import locate
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.message import counted

_GIB = 2**30


def plan(
    model: ModelOption = None,
    data: DataOption = None,
    objective: ObjectiveOption = None,
    config: ConfigOption = None,
    set: SetOption = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; this machine's by default.")] = None,
    device_memory: Annotated[
        float | None, typer.Option(min=0.001, help="Memory in GiB, to plan for another machine.")
    ] = None,
    peak: Annotated[
        float | None, typer.Option(min=0.001, help="Peak TFLOP/s in matrix products; measured by default.")
    ] = None,
    mfu: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the peak that training reaches.")] = 0.3,
    json: JsonOption = False,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Estimate memory, micro-batch and time of a training from the model's config alone.

    With -w, or in a workspace's folder: of the training that posttrain.yaml describes, on the newest training set.
    """
    file = workspace / CONFIG_FILE
    # A model that is named alone, in the folder of a workspace, is one to look at and not the workspace's.
    if config is None and file.is_file() and (model is None or workspace != CURRENT_FOLDER):
        config, data = file, data or _training_set(workspace)
    elif workspace != CURRENT_FOLDER and not file.is_file() and not (workspace / ".posttrain").is_dir():
        raise UserError(f"no {CONFIG_FILE} here", where=str(workspace), fix=f"posttrain init {workspace}")
    settings = read_settings(config, {"model": model, "data": data, "train.objective": objective}, set or [], plan=True)
    source = locate(settings.model, Path(), weights=False)
    # After the checks: a mistake in an option is reported before torch is loaded.
    from posttrain.train.plan import Machine, plan_training

    machine = Machine.detect(device, None if device_memory is None else int(device_memory * _GIB), peak, mfu)
    records = read_records(settings, workspace).records if settings.data else None
    result = plan_training(settings, source, records, machine)
    if json:
        print_json(result)
    else:
        _print(result)


def _training_set(root: Path) -> list[str] | None:
    """Returns the id of the newest training set of a workspace; None before its first round."""
    if not (root / ".posttrain" / "format.json").is_file():
        return None
    with open_store(root) as store:
        id = store.metadata.named("train")
    return None if id is None else [id]


def _print(result: dict[str, Any]) -> None:
    print_line(
        f"{result['model']}: {result['family']}, {_count(result['parameters']['all'])} parameters, "
        f"{result['precision']}"
    )
    kinds = [[kind, _count(count)] for kind, count in result["parameters"].items() if count]
    print_table("", ["weights", "numbers"], kinds)
    print_line("")
    memory = result["memory"]
    print_table("at the peak", ["part", "GiB"], [[name, size / _GIB] for name, size in memory["parts"].items()])
    available = memory["available"]
    fit = "fits" if memory["fits"] else "DOES NOT FIT"
    fits = "" if available is None else f" of {available / _GIB:.2f} GiB: {fit}"
    print_line(f"together {memory['total'] / _GIB:.2f}{fits} ({result['device']})")
    if not memory["fits"] and memory["recompute"]:
        print_line(f"it fits with train.recompute={memory['recompute']}")
    if memory["host"]:
        print_line(f"and {memory['host'] / _GIB:.2f} GiB of the host's memory")
    if memory["stage"] is not None:
        print_line(f"of {len(memory['stages'])} phases, train.phases.{memory['stage']} needs the most")
    for mix in result["mixes"]:
        rows = [
            [name, counts["records"], counts["met"], f"{counts['epochs']:.2f}"] for name, counts in mix["kinds"].items()
        ]
        print_table(f"mix of train.phases.{mix['phase']}", [mix["by"], "records", "met", "epochs"], rows)
    batch, work = result["micro_batch"], result["work"]
    choice = "" if batch["auto"] is None else f"; train.micro_batch_tokens=auto takes {batch['auto']}"
    print_line(f"micro-batch: {counted(batch['tokens'], 'token')}, {batch['supervised']:,} of them supervised{choice}")
    print_line(
        f"a step: {work['tokens']:,.0f} tokens, {work['flops'] / 1e12:.3g} TFLOP, {work['seconds']:.3g} s at"
        f" {work['mfu']:.0%} of {work['peak'] / 1e12:.3g} TFLOP/s"
    )
    if work["steps"]:
        print_line(f"{counted(work['steps'], 'step')}, {work['steps'] * work['seconds'] / 3600:.2f} h")


def _count(number: int) -> str:
    return f"{number:,}"
