"""``posttrain tune``: searches the best settings of a training; ``show`` and ``report`` are about a study."""

import shlex
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.verbs import LazyGroup, LazyVerb
from posttrain.cli.workspace import CURRENT_FOLDER
from posttrain.loop.config import config_lines
from posttrain.store.errors import UserError, WorkError
from posttrain.store.extensions import add_module_folder
from posttrain.store.message import counted
from posttrain.store.yaml_files import read_yaml

if TYPE_CHECKING:
    from posttrain.tune.trial import Span

_SHOWN = 10  # trials of a table

_ERRORS = 3  # of failed trials that are shown

_NO_LIMITS = "; no trial meets the limits"


class _Verbs(LazyGroup):
    """Takes what is not a verb for the config of a study: ``posttrain tune CONFIG.yaml`` runs it."""

    verbs: ClassVar = {
        "run": LazyVerb(
            "posttrain.cli.tune:run",
            "Search for the best settings in the space that a config defines; resume a stopped search.",
        ),
        "show": LazyVerb(
            "posttrain.cli.tune:show", "Show a study: its best trials, and the number of trials in each state."
        ),
        "report": LazyVerb(
            "posttrain.cli.tune:report", "Write one page about a study: what mattered, and every trial."
        ),
    }
    default: ClassVar = "run"


app = typer.Typer(name="tune", cls=_Verbs, no_args_is_help=True)


@app.callback()
def tune() -> None:
    """Search for the best training settings with the least compute; resume a study.

    `posttrain tune CONFIG.yaml --out DIR` runs a search, and resumes it if it was stopped.
    """


def run(
    config: Annotated[
        Path, typer.Argument(help="YAML with `model`, `data`, `task`, `train` and `tune`; paths are relative to it.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the search and its results, required; the same folder resumes a search."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="When to stop: 50 trials, 2h, 2M tokens, or several with commas; tune.budget by default."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Where trials run: inline (one at a time), processes, ray or slurm; tune.engine by default."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Trials at a time; tune.workers, or one per core by default.")
    ] = None,
) -> None:
    """Search for the best settings in the space that a config defines; resume a stopped search."""
    if out is None:
        raise UserError("say where to keep the study", where="--out")
    # After the options, as the search imports torch.
    from posttrain.jobs.runner import check_engine
    from posttrain.train.api import read_files
    from posttrain.train.standalone import SUMMARY
    from posttrain.tune.lint import check_edges
    from posttrain.tune.progress import describe_best, describe_current
    from posttrain.tune.space import Space
    from posttrain.tune.study_files import FRONT_FOLDER
    from posttrain.tune.trainings.config import TuneJobConfig
    from posttrain.tune.trainings.one_shot import MODEL
    from posttrain.tune.trainings.search import tune_trainings

    if engine is not None:
        check_engine(engine, workers)
    add_module_folder(config.parent)
    values = read_yaml(config)
    if "tune" not in values:
        raise UserError("has no section `tune`", where=str(config), fix="name what to search: see docs/tuning.md")
    with config_lines(CURRENT_FOLDER, str(config)):
        read = TuneJobConfig.read(values, str(config))
        section, job = read.tune, read.training.with_paths_from(lambda key: config.parent)
        result = tune_trainings(
            job,
            section,
            read_files(job),
            out,
            root=config.parent,
            budget=budget,
            engine=engine,
            workers=workers,
        )
    if result.best is None:
        reason = next((trial.error for trial in result.trials if trial.error), "the budget was spent before one had")
        raise WorkError(f"no trial has a value: {reason}")
    current, objectives = "", section.searched
    if result.current is not None:
        current = f"; {describe_current(result.current, result.best, objectives)}"
    if result.front:
        best = describe_best(result.best, objectives, result.front)
        print_line(f"{best}; {counted(len(result.trials), 'trial')} in all{current}")
        limits = "" if objectives.meets_limits(result.best) else _NO_LIMITS
        print_line(f"chosen by the rule: {section.choose}{limits}; a config of each: {out / FRONT_FOLDER}")
    else:
        count = counted(len(result.trials), "trial")
        best = describe_best(result.best, objectives)
        print_line(f"{best} of {count}, by held-out {', '.join(section.metrics)}{current}")
    for name, value in result.best.settings.items():
        print_line(f"  {name}: {value}")
    for warning in check_edges(Space(section.space, section.constraints), result.best):
        print_line(warning)
    trained = out / "trials" / f"{result.best.number:04d}" / "model"
    if (trained / SUMMARY).exists():
        print_line(f"the best trial's model: {trained}")
    if len(result.schedule) > 1:
        print_line("its settings changed while it trained:")
        _print_schedule(result.schedule)
        return
    if section.one_shot:
        print_line(f"the best sub-network: {out / MODEL}; to train its ranks alone:")
    print_line(shlex.join(["posttrain", "train", "--config", str(out / "best.yaml"), "--out", "MODEL"]))


FolderArgument = Annotated[Path, typer.Argument(help="Folder of the study, or of a round's search.")]

StorageOption = Annotated[str | None, typer.Option(help="The study's PostgreSQL database, as tune.storage.")]


def show(
    folder: FolderArgument,
    storage: StorageOption = None,
    json: JsonOption = False,
) -> None:
    """Show a study: its best trials, and the number of trials in each state."""
    from posttrain.store.files import is_locked
    from posttrain.tune.progress import describe_best
    from posttrain.tune.storage import LOCK, TRIALS_FOLDER, read_name
    from posttrain.tune.study import read_left
    from posttrain.tune.transfer.past import read_kept_study
    from posttrain.tune.transfer.warm_start import warm_start_sentences
    from posttrain.tune.trial import TrialState, lineage, rank, schedule_to_json

    name = read_name(folder, storage)
    goal, trials, _ = read_kept_study(folder, storage, name)
    left = read_left(folder, storage, name)
    best = goal.best_trial(trials)
    objectives = goal.objectives
    several = len(objectives) > 1
    front = sorted(objectives.front(trials), key=lambda trial: objectives.losses(trial.values or ())) if several else []
    ranked = front or sorted(trials, key=lambda trial: rank(trial, goal.maximize))
    spans = [] if best is None else lineage(trials, best.number)
    counts = Counter(str(trial.state) for trial in trials)
    sentences = warm_start_sentences(folder)
    if json:
        print_json(
            {
                "objective": goal.objective,
                "maximize": goal.maximize,
                **({**objectives.to_json(), "front": [trial.number for trial in front]} if several else {}),
                "best": None if best is None else best.to_json(),
                "schedule": schedule_to_json(spans),
                "states": dict(counts),
                "seconds": sum(trial.seconds for trial in trials),
                "tokens": sum(trial.tokens for trial in trials),
                "budget_left": left,
                "warm_start": list(sentences),
                "trials": [trial.to_json() for trial in trials],
            }
        )
        return
    names = list(goal.space.parameters)
    parents = any(trial.fork for trial in trials)
    rows = [
        [
            *(trial.number, str(trial.state)),
            *(_number(value) for value in trial.latest_values or [None] * len(objectives)),
            *(trial.step, f"{trial.seconds:.1f}"),
            *([f"{trial.fork.parent} at {trial.fork.step}" if trial.fork else ""] if parents else []),
            *(_number(trial.settings.get(name)) for name in names),
        ]
        for trial in ranked[: max(_SHOWN, len(front))]
    ]
    spent = "spent" if "seconds" in objectives.names else "seconds"  # no two columns of one name
    headings = ["trial", "state", *objectives.names, "step", spent, *(["continues from"] if parents else []), *names]
    print_table("", headings, rows)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    summary = f"{counted(len(trials), 'trial')}: {states}" if trials else "no trials yet"
    print_line(f"{summary}; {left}" if left else summary)
    if counts["running"] and not is_locked(folder / TRIALS_FOLDER / LOCK):
        print_line("no process works on the study; posttrain tune continues it")
    print_line(describe_best(best, objectives, front))
    if best is not None and front:
        limits = "" if objectives.meets_limits(best) else _NO_LIMITS
        print_line(f"chosen by the rule: {objectives.choose}{limits}")
    if len(spans) > 1:
        _print_schedule(spans)
    for sentence in sentences:
        print_line(sentence)
    for trial in [trial for trial in trials if trial.state is TrialState.FAILED][:_ERRORS]:
        print_line(f"trial {trial.number} failed: {trial.error}")


def report(
    folder: FolderArgument,
    out: Annotated[Path, typer.Argument(help="HTML file to write.")] = Path("report.html"),
    storage: StorageOption = None,
) -> None:
    """Write one page about a study: what mattered, and every trial."""
    from posttrain.web.page import check_page_file, write_page

    check_page_file(out)
    from posttrain.tune.report.study import study_page
    from posttrain.tune.storage import read_name
    from posttrain.tune.transfer.past import read_kept_study
    from posttrain.tune.transfer.warm_start import warm_start_sentences

    goal, trials, events = read_kept_study(folder, storage, read_name(folder, storage))
    build = partial(study_page, goal, trials, events, folder.resolve().name, warm_start_sentences(folder))
    print_line(write_page(out, build).sentence)
    print_line(f"wrote {out}")


def _print_schedule(spans: "Sequence[Span]") -> None:
    """Prints which trial ran which steps of a lineage, and its settings."""
    names = list(dict.fromkeys(name for span in spans for name in span.trial.settings))
    rows = [
        [
            *(f"{span.start + 1} to {span.end}", span.trial.number),
            *(_number(span.trial.settings.get(name)) for name in names),
        ]
        for span in spans
    ]
    print_table("", ["steps", "trial", *names], rows)


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
