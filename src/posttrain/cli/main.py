"""The command ``posttrain``: lists its verbs, and turns errors into exit codes."""

import os
import sys
import traceback
from typing import ClassVar

import typer
from typer.exceptions import TyperException

from posttrain import __version__
from posttrain.cli.output import error_console, setup_logging
from posttrain.cli.verbs import LazyGroup, LazyVerb
from posttrain.store.errors import UserError, WorkError


class _Verbs(LazyGroup):
    verbs: ClassVar = {
        "demo": LazyVerb(
            "posttrain.cli.demo:demo",
            "Run the whole loop on a bundled task: label a few records, train, deploy only a better model.",
        ),
        "init": LazyVerb("posttrain.cli.init:init", "Create a workspace with a commented posttrain.yaml."),
        "run": LazyVerb("posttrain.cli.run:run", "Run the loop; resume where it stopped."),
        "status": LazyVerb(
            "posttrain.cli.status:status", "Show the rounds, the champion, and what the loop waits for."
        ),
        "show": LazyVerb("posttrain.cli.show:show", "Show any artifact, run, round or record with its lineage."),
        "report": LazyVerb("posttrain.cli.report:report", "Write one self-contained HTML page that works offline."),
        "serve": LazyVerb(
            "posttrain.cli.serve:serve",
            "Collect feedback at POST /v1/feedback; with POSTTRAIN_TOKEN set, only from clients that send it.",
        ),
        "select": LazyVerb(
            "posttrain.cli.select.select:app",
            "Choose pool records worth labelling, scored by the champion; labels nothing.",
        ),
        "train": LazyVerb(
            "posttrain.cli.train:train", "Train a model on a file or a dataset version; resume a stopped training."
        ),
        "plan": LazyVerb(
            "posttrain.cli.plan:plan",
            "Estimate memory, micro-batch and time of a training from the model's config alone.",
        ),
        "eval": LazyVerb("posttrain.cli.evaluate:evaluate", "Measure a model on the suites of the config."),
        "config": LazyVerb("posttrain.cli.config:app", "Show, search or check posttrain.yaml."),
        "data": LazyVerb("posttrain.cli.data:app", "Build, inspect and export dataset versions."),
        "label": LazyVerb("posttrain.cli.label:app", "Export batches to label, and import the labels."),
        "models": LazyVerb("posttrain.cli.models:app", "List, promote, roll back and export models."),
    }


app = typer.Typer(
    name="posttrain",
    cls=_Verbs,
    help="Improve a language model in rounds: collect, select, label, train, evaluate, decide, deploy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks and debug lines."),
) -> None:
    setup_logging(debug)
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with 0 (done), 1 (the work failed) or 2 (the call or input was wrong)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # No telemetry: nothing leaves the machine unless the user asks for it.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    try:
        # Standalone mode would exit by itself with codes of its own.
        code = int(app(arguments, standalone_mode=False) or 0)
        if code == _INTERRUPTED:  # typer's exit code for Ctrl-C
            error_console.print("stopped; the same command resumes from here")
        return code
    except TyperException as error:
        # The message is empty where help was printed instead.
        if line := " ".join(error.format_message().split()):
            error_console.print(f"posttrain: {line}", markup=False, style="red", soft_wrap=True)
        return 2
    except typer.Abort:
        return _INTERRUPTED
    except UserError as error:
        return _fail(error, 2, arguments)
    except WorkError as error:
        return _fail(error, 1, arguments)
    except Exception as error:  # noqa: BLE001 - the last line of defence turns a defect into one line and a 1
        return _fail(error, 1, arguments, f"{type(error).__name__}: ", "; --debug shows where")


def _fail(error: Exception, code: int, arguments: list[str], before: str = "", after: str = "") -> int:
    # From the arguments, since an error may come before the options are parsed.
    if "--debug" in arguments:
        traceback.print_exception(error)
    else:
        # A user's mistake is one line, however the message was wrapped.
        line = " ".join(str(error).split())
        error_console.print(f"posttrain: {before}{line}{after}", markup=False, style="red", soft_wrap=True)
    return code
