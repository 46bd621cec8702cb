"""The command ``posttrain``: lists its verbs, and turns errors into exit codes."""

import os
import sys
import traceback
from itertools import pairwise
from typing import ClassVar

import typer
from typer.exceptions import TyperException

from posttrain.cli.output import MAX_LINE, print_error_text, setup_logging
from posttrain.cli.process import (
    BROKEN_PIPE_CODE,
    STOP_CODES,
    discard_output,
    is_output_refusal,
    prepare_streams,
    stop_on_signals,
)
from posttrain.cli.verbs import LazyGroup, LazyVerb
from posttrain.store.errors import DamagedArtifactError, UserError, WorkError, shorten, to_line
from posttrain.store.installation import version_text
from posttrain.store.paths import to_path_mistake
from posttrain.store.secrets import mask_text

_LOAD = "load the folder of `posttrain show champion`, or that of `posttrain train --out`, in transformers or vLLM"


class _Verbs(LazyGroup):
    elsewhere: ClassVar = {
        **dict.fromkeys(("chat", "generate", "inference", "predict"), _LOAD),
        **{name: f"posttrain train --objective {name}" for name in ("dpo", "kto", "orpo", "reward", "sft")},
        **dict.fromkeys(("grpo", "ppo", "rloo"), "reinforcement learning is not supported; preferences train with dpo"),
        "export": "posttrain models export, posttrain data export, or posttrain label export",
        "resume": "type the same command again: posttrain run, or posttrain train with the same --out",
        "deploy": "posttrain models promote",
        "rollback": "posttrain models rollback",
    }
    verbs: ClassVar = {
        "demo": LazyVerb(
            "posttrain.cli.demo:demo",
            "Run the whole loop on a bundled task: label a few records, train, deploy only a better model.",
        ),
        "init": LazyVerb(
            "posttrain.cli.init:init",
            "Create a workspace with a commented posttrain.yaml; with --test and --pool, for your files.",
        ),
        "run": LazyVerb(
            "posttrain.cli.run:run", "Run the loop until it is done or needs labels; the same command resumes it."
        ),
        "status": LazyVerb(
            "posttrain.cli.status:status", "Show the rounds, the champion, and what the loop waits for."
        ),
        "show": LazyVerb("posttrain.cli.show:show", "Show any artifact, run, round or record with its lineage."),
        "report": LazyVerb(
            "posttrain.cli.report:report",
            "Write a report on the loop, or on trainings, as one HTML page that works offline.",
        ),
        "doctor": LazyVerb(
            "posttrain.cli.doctor:doctor",
            "Check versions, devices, disks, optional parts, models and the workspace; say what to install or mend.",
        ),
        "verify": LazyVerb(
            "posttrain.cli.verify:verify",
            "Compare everything that is stored with its checksums; rebuild a lost database.",
        ),
        "backup": LazyVerb(
            "posttrain.cli.backup:backup",
            "Copy the workspace as it is at one moment, while the loop runs, to a file, a folder or S3.",
        ),
        "restore": LazyVerb("posttrain.cli.backup:restore", "Restore a workspace from a backup."),
        "serve": LazyVerb(
            "posttrain.cli.serve:serve",
            "Serve the pages and the API, and collect feedback at POST /v1/feedback.",
        ),
        "accounts": LazyVerb(
            "posttrain.cli.accounts:app", "Add people who may sign in, and issue invitations and tokens."
        ),
        "select": LazyVerb(
            "posttrain.cli.select.select:app",
            "Show which pool records the champion would have you label next, without asking anyone.",
        ),
        "train": LazyVerb(
            "posttrain.cli.train:train", "Train a model on a file or a dataset version; resume a stopped training."
        ),
        "tune": LazyVerb(
            "posttrain.cli.tune:app", "Search for the best training settings with the least compute; resume a study."
        ),
        "plan": LazyVerb(
            "posttrain.cli.plan:plan",
            "Estimate memory, micro-batch and time of a training from the model's config alone.",
        ),
        "eval": LazyVerb(
            "posttrain.cli.evaluate:evaluate",
            "Measure a model, the champion by default, or an ensemble of models on the test suites of the config.",
        ),
        "merge": LazyVerb(
            "posttrain.cli.merge:merge",
            "Merge models into one, by a recipe or by options: posttrain merge A B --method ties --base C --out DIR.",
        ),
        "config": LazyVerb("posttrain.cli.config:app", "Show, search or check posttrain.yaml."),
        "data": LazyVerb(
            "posttrain.cli.data:app",
            "Check files, build versions of datasets from them (add --name), inspect and export these.",
        ),
        "label": LazyVerb(
            "posttrain.cli.label:app", "Label batches on the pages or in files, and report the quality of labels."
        ),
        "models": LazyVerb("posttrain.cli.models:app", "List, promote, roll back, export and push models."),
    }


app = typer.Typer(
    name="posttrain",
    cls=_Verbs,
    help="Improve a language model in rounds: collect, select, label, train, evaluate, decide, deploy.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

_INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version with its commit, and exit."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks and debug lines."),
) -> None:
    setup_logging(debug)
    if version:
        typer.echo(version_text())
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with 0 (done), 1 (the work failed) or 2 (the call or input was wrong).

    A signal that ended it gives 128 and its number, as in shells.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # No telemetry: nothing leaves the machine unless the user asks for it.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if any(first.startswith("-") and first.endswith("-completion") for first, _ in pairwise(arguments)):
        # By default typer takes no name of a shell here, and goes by the shell that it runs in.
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    prepare_streams()
    with stop_on_signals():
        code = _run(arguments)
    sys.exit(code)


def _is_out_of_memory(error: Exception) -> bool:
    # Where torch is not loaded, only Python's own error can tell.
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from posttrain.models.loading import is_out_of_memory

    return is_out_of_memory(error)


def _run(arguments: list[str]) -> int:
    try:
        # Before the verb or behind it, as the last line of a failed command asks for it.
        before = ["--debug"] if "--debug" in arguments else []
        rest = [argument for argument in arguments if argument != "--debug"]
        # Standalone mode would exit by itself with codes of its own.
        code = int(app([*before, *rest], standalone_mode=False) or 0)
        # Now, and not when the interpreter exits, which would end in a traceback.
        sys.stdout.flush()
        return _stopped(code) if code == _INTERRUPTED else code  # typer's exit code for Ctrl-C
    except TyperException as error:
        # The message is empty where help was printed instead.
        if line := to_line(error.format_message()):
            print_error_text(f"posttrain: {line}{_setting_hint(error)}")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return _stopped(_INTERRUPTED)
    except SystemExit as stop:
        # typer and rich exit by themselves where nothing reads their output.
        if isinstance(stop.__context__, BrokenPipeError):
            return _closed_output()
        code = stop.code if isinstance(stop.code, int) else 1
        return _stopped(code) if code in STOP_CODES else code
    except BrokenPipeError:
        return _closed_output()
    except UserError as error:
        return _fail(error, 2, arguments)
    except DamagedArtifactError as error:
        return _fail(error, 1, arguments, after="; posttrain verify lists all damage and what to do")
    except WorkError as error:
        return _fail(error, 1, arguments)
    except Exception as error:  # noqa: BLE001 - the last line of defence turns a defect into one line and a 1
        if is_output_refusal(error):
            discard_output()
            return _fail(WorkError(f"the output cannot be written: {os.strerror(getattr(error, 'errno', 0))}"), 1, [])
        if mistake := to_path_mistake(error):
            return _fail(mistake, 2, arguments)
        if _is_out_of_memory(error):
            return _fail(WorkError("out of memory; close other programs, or raise the limit (ulimit -v)"), 1, arguments)
        return _fail(error, 1, arguments, f"{type(error).__name__}: ", "; --debug shows where")


def _setting_hint(error: TyperException) -> str:
    """Returns how a setting of a training is given that was taken for an option, as it is one in other trainers."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or context.info_name not in ("train", "plan"):
        return ""
    # Here, as only this error needs the config.
    from posttrain.store.section import suggest_key
    from posttrain.train.standalone import TrainJobConfig

    hint = suggest_key(TrainJobConfig, [option.lstrip("-").replace("-", "_")])
    return f"; settings are given by --set KEY=VALUE: {hint}" if hint else ""


def _stopped(code: int) -> int:
    print_error_text("stopped; the same command resumes from here", style=None)
    return code


def _closed_output() -> int:
    discard_output()
    print_error_text("posttrain: the output was closed before its end")
    return BROKEN_PIPE_CODE


def _fail(error: Exception, code: int, arguments: list[str], before: str = "", after: str = "") -> int:
    # From the arguments, since an error may come before the options are parsed.
    if "--debug" in arguments:
        print_error_text(mask_text("".join(traceback.format_exception(error))).rstrip(), style=None)
    else:
        # A user's mistake is one line, however the message was wrapped.
        line = mask_text(to_line(str(error)[: 2 * MAX_LINE]))
        print_error_text(f"posttrain: {before}{shorten(line, MAX_LINE)}{after}")
    return code
