"""The page of a study: what mattered, what was gained, and every trial's fate."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from posttrain.report.charts.bars import format_seconds
from posttrain.report.charts.chart import truncate
from posttrain.report.formatting import number_text, percent_text
from posttrain.report.section import Block, Fold, Grid, Page, Pairs, Section, Table, Text, Tile, blocks
from posttrain.store.message import counted
from posttrain.tune.events import Event
from posttrain.tune.goal import Goal
from posttrain.tune.importance import Importance, measure_importance
from posttrain.tune.lint import check_edges, check_space
from posttrain.tune.losses import FEWEST
from posttrain.tune.objectives import Objective, Objectives
from posttrain.tune.report.charts import StudyCharts, setting_text, study_charts
from posttrain.tune.report.front import front_charts
from posttrain.tune.trial import Trial, TrialState, best_trial, rank, with_objective

_HISTORY = "The final or latest value of each trial, and the best of those that have finished. "

_BEST = 20  # rows of the table of trials
_ERRORS = 20  # different errors that are listed
_LETTERS = 300  # of an error

_FIT = 0.3  # R² of the forest below which shares are not a finding

_SECOND = 0.1  # share from which the second setting is named, too


def study_page(
    goal: Goal,
    trials: Sequence[Trial],
    events: Sequence[Event],
    name: str,
    warm_start: Sequence[str] = (),
    detail: float = 1.0,
) -> Page:
    """Returns the page of a study.

    Args:
        goal: what the study searches.
        trials: its trials, by number.
        events: what happened, in its order; empty of a search whose times were not kept.
        name: of the study.
        warm_start: sentences on how it was started.
        detail: share of the points that are drawn where there are too many.
    """
    parts = _split(goal, trials, events, detail)
    best = goal.best_trial(trials)
    front = goal.objectives.front(trials) if len(parts) > 1 else []
    sentence = summarize(goal, trials, parts[0].importance)
    if front:
        sentence = _summarize_front(goal, trials, front, parts)
    unvalued = [trial for trial in trials if trial.latest is None]
    remarks = "" if events or not trials else "What the trials of a round's search took is not kept. "
    remarks = remarks or "Seconds are those that the study was worked on, as its budget counts them. "
    if unvalued:
        count = counted(len(unvalued), "trial")
        remarks += f" Not drawn: {count} without a value ({_states_text(unvalued)})."
    sections = [
        _result_section(goal, best, front, warm_start, _warnings(goal, best)),
        *([_front_section(goal, trials, front, best, detail)] if len(parts) > 1 else []),
        _section("History", parts, lambda part: part.charts.history, f"{_HISTORY}{{note}} {remarks}", "history"),
        *([_curves_section(parts)] if any(part.charts.curves for part in parts) else []),
        _importance_section(parts),
        _section(
            "Settings",
            parts,
            lambda part: [Grid(part.charts.slices)] if part.charts.slices else [],
            "Each setting alone, over {compared}, the most important first. {note}",
            "slices",
        ),
        _trials_section(goal, trials, front),
    ]
    headline = _headline(goal, trials, parts[0].importance, best, front)
    return Page(f"Study {name}", "tune", sentence, headline, sections)


def search_fold(name: str, goal: Goal, trials: Sequence[Trial], detail: float, *, is_open: bool) -> Fold:
    """Returns a round's search, folded: its history, its curves, and which settings mattered."""
    (part,) = _split(goal, trials, (), detail)
    charts = part.charts
    shown = blocks(Text(summarize(goal, trials, part.importance)), charts.history, charts.curves, charts.importance)
    return Fold(name, shown, remark=counted(len(trials), "trial"), is_open=is_open)


@dataclass(frozen=True)
class _ObjectiveReport:
    """A study of one objective, which each of several is for most charts.

    Args:
        goal: of it.
        trials: with the values of the objective.
        importance: of the settings for it.
        charts: of it.
    """

    goal: Goal
    trials: Sequence[Trial]
    importance: Importance
    charts: StudyCharts


def _section(
    title: str,
    parts: Sequence[_ObjectiveReport],
    draw: Callable[[_ObjectiveReport], Sequence[Block]],
    caption: str,
    note: str,
) -> Section:
    """Returns a section with the charts of each objective, under its name where there are several.

    Args:
        caption: Where ``{compared}`` stands for the values that are compared, and ``{note}`` for what is not drawn.
        note: Name of that note.
    """
    shown: list[Block] = []
    for number, part in enumerate(parts):
        if drawn := draw(part):
            text = caption.format(compared=_values_text(part.importance), note=part.charts.notes[note])
            heading = Text(part.goal.objective if len(parts) > 1 else "", "heading")
            shown += blocks(heading, Text(text, "note" if number else "caption"), drawn)
    return Section(title, shown, "No trial has a value yet.")


def _result_section(
    goal: Goal, best: Trial | None, front: Sequence[Trial], warm_start: Sequence[str], warnings: Sequence[str]
) -> Section:
    if best is None:
        return Section("Result", [], "No trial has a value yet.")
    caption = f"The settings of the best trial, number {best.number}"
    if front:
        missed = "" if goal.objectives.meets_limits(best) else "; no trial meets the limits"
        caption = (
            f"The settings of trial {best.number}, which the rule {goal.objectives.choose} takes of the front{missed}"
        )
        caption += ". The folder front has a config of each of its trials"
    elif best.state is not TrialState.FINISHED:
        caption += f", which is {best.state} at step {best.step}"
    shown = [Text(f"{caption}.", "caption"), *(Text(text, "sentence") for text in warm_start)]
    pairs = Pairs([(key, setting_text(value)) for key, value in best.settings.items()])
    return Section("Result", [*shown, *(Text(text, "sentence") for text in warnings), pairs])


def _front_section(
    goal: Goal, trials: Sequence[Trial], front: Sequence[Trial], best: Trial | None, detail: float
) -> Section:
    if not front:
        return Section("Front", [], "No trial has finished yet.")
    charts, front_note = front_charts(goal.objectives, trials, front, best, detail)
    objectives = ", ".join(_objective_text(item) for item in goal.objectives.items)
    caption = (
        f"Finished trials, by {objectives}. A trial is on the front if no other is as good in every objective and "
        f"better in one. {front_note}"
    )
    return Section("Front", blocks(Text(caption, "caption"), charts))


def _curves_section(parts: Sequence[_ObjectiveReport]) -> Section:
    drawn = [part.charts for part in parts if part.charts.curves]
    caption = (
        "The values that trials have reported. The shape at the end of a curve says whether its trial finished, was "
        f"stopped, is paused and may continue, runs, or failed. {drawn[0].notes['curves']}"
    )
    return Section("Curves", blocks(Text(caption, "caption"), (charts.curves for charts in drawn)))


def _importance_section(parts: Sequence[_ObjectiveReport]) -> Section:
    shown: list[Block] = []
    for part in parts:
        importance = part.importance
        if not importance.count:
            continue
        together = percent_text(max(0.0, 1 - sum(importance.shares.values())))
        caption = (
            f"Over {_values_text(importance)}. fANOVA: the share of the variance over the whole space that a setting "
            f"alone explains; {together} is left for settings together. The random forest behind it has R² "
            f"{importance.fit:.2f} for trials that it has not seen: near 1 the shares can be relied on, near 0 they "
            f"are noise."
        )
        shown += blocks(
            Text(part.goal.objective if len(parts) > 1 else "", "heading"),
            Text(caption, "note" if shown else "caption"),
            (Text(line, "note") for line in _left_out(part.goal, part.trials, importance)),
            part.charts.importance,
        )
    return Section("Importance", shown, "There are too few different values to compare settings by.")


def _trials_section(goal: Goal, trials: Sequence[Trial], front: Sequence[Trial]) -> Section:
    if not trials:
        return Section("Trials", [], "No trial has been started.")
    best, (errors, note) = _best_trials(goal, trials, front), _errors(trials)
    order = "those of the front first, then finished ones" if front else "finished ones first"
    caption = f"The best {len(best.rows)}: {order}, then those that came furthest. All are in trials.jsonl."
    failed = (Text("Errors", "heading"), errors, Text(note, "note")) if errors.rows else None
    return Section("Trials", blocks(Text(caption, "caption"), best, failed))


def _split(goal: Goal, trials: Sequence[Trial], events: Sequence[Event], detail: float) -> list[_ObjectiveReport]:
    """Returns the study of each objective."""
    parts = []
    for index, objective in enumerate(goal.objectives.items):
        values = [with_objective(trial, index) for trial in trials] if len(goal.objectives) > 1 else trials
        importance = measure_importance(goal.space, values, maximize=objective.maximize)
        single = Goal(goal.space, Objectives((objective,)), goal.identity)
        charts = study_charts(single, values, events, importance, detail / len(goal.objectives.items))
        parts.append(_ObjectiveReport(single, values, importance, charts))
    return parts


def summarize(goal: Goal, trials: Sequence[Trial], importance: Importance) -> str:
    """Says in a sentence what mattered and what was gained, or why that cannot be said."""
    best, compared = best_trial(trials, maximize=goal.maximize), importance.compared
    if not trials:
        return "No trial has been started."
    if best is None or best.latest is None:
        return f"None of {counted(len(trials), 'trial')} has a value: {_states_text(trials)}."
    at = "" if best.state is TrialState.FINISHED else f" at step {best.step}"
    gained = f"the best trial has {goal.objective} {number_text(best.latest)}{at}"
    if len(compared.values) > 1:
        middle = number_text(median(compared.values.values()))
        gained += f", the median{_at_step(importance)} is {middle}"
    what = _mattered(importance)
    return f"{what}; {gained}."


def _summarize_front(
    goal: Goal, trials: Sequence[Trial], front: Sequence[Trial], parts: Sequence[_ObjectiveReport]
) -> str:
    """Says what the front has, which trial was chosen, and what mattered for each objective."""
    objectives, best = goal.objectives, goal.best_trial(trials)
    assert best is not None, "a front has a best trial"
    finished = sum(trial.state is TrialState.FINISHED for trial in trials)
    mattered = [f"{part.goal.objective}: {_mattered(part.importance)}" for part in parts]
    chosen = f"the rule {objectives.choose} takes trial {best.number}: {objectives.describe(best.values or ())}"
    return f"{len(front):,} of {counted(finished, 'finished trial')} are on the front; {chosen}. {'; '.join(mattered)}."


def _objective_text(objective: Objective) -> str:
    limit = "" if objective.limit is None else f" (limit {number_text(objective.limit)})"
    return f"{objective.text}{limit}"


def _mattered(importance: Importance) -> str:
    compared = importance.compared.values
    over = f"{counted(importance.count, 'trial')}{_at_step(importance)}"
    if len(compared) < FEWEST:
        comparable = f"{counted(len(compared), 'trial')} with comparable values"
        return f"{comparable} cannot show which setting mattered (it takes {FEWEST})"
    if not importance.count:
        return f"All {len(compared):,} trials have the same value, so that no setting mattered"
    if not importance.shares:
        return "Which setting mattered cannot be told, as none exists in all trials"
    if importance.fit < _FIT:
        return (
            f"Which setting mattered cannot be told: over {over} the settings hardly predict the value "
            f"(R² {importance.fit:.2f} for trials left out)"
        )
    (name, share), *others = importance.shares.items()
    text = f"{name} explains {100 * share:.0f}% of the differences"
    if others and others[0][1] >= _SECOND:
        text += f" and {others[0][0]} {100 * others[0][1]:.0f}%"
    return f"{text} (fANOVA over {over})"


def _at_step(importance: Importance) -> str:
    step = importance.compared.step
    return "" if step is None else f" at step {step:,}"


def _states_text(trials: Sequence[Trial]) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in Counter(str(t.state) for t in trials).most_common())


def _headline(
    goal: Goal, trials: Sequence[Trial], importance: Importance, best: Trial | None, front: Sequence[Trial]
) -> tuple[Tile, ...]:
    tiles: list[Tile] = []
    compared = importance.compared.values
    if front and best is not None:
        values = zip(goal.objectives.names, best.values or (), strict=True)
        remark = f"trial {best.number}, by the rule {goal.objectives.choose}"
        tiles += [(number_text(value), name, remark) for name, value in values]
        finished = sum(trial.state is TrialState.FINISHED for trial in trials)
        tiles.append((f"{len(front):,}", "on the front", f"of {counted(finished, 'finished trial')}"))
    elif best is not None and best.latest is not None:
        at = "" if best.state is TrialState.FINISHED else f", {best.state} at step {best.step}"
        tiles.append((number_text(best.latest), f"best {goal.objective}", f"trial {best.number}{at}"))
    if len(compared) > 1 and not front:
        middle = number_text(median(compared.values()))
        tiles.append((middle, "median", f"of {counted(len(compared), 'trial')}{_at_step(importance)}"))
    tiles.append((f"{len(trials):,}", "trials", _states_text(trials)))
    if work := sum(trial.seconds for trial in trials):
        tiles.append((format_seconds(work), "of work", "all trials together"))
    if tokens := sum(trial.tokens for trial in trials):
        tiles.append((number_text(float(tokens)), "tokens", "of all trials"))
    return tuple(tiles)


def _warnings(goal: Goal, best: Trial | None) -> list[str]:
    if best is None:
        return []
    return [warning.replace("`", "") for warning in [*check_edges(goal.space, best), *check_space(goal.space)]]


def _values_text(importance: Importance) -> str:
    step = importance.compared.step
    return "the final values of finished trials" if step is None else f"the values at step {step:,}"


def _left_out(goal: Goal, trials: Sequence[Trial], importance: Importance) -> list[str]:
    """Lists which trials and settings importance does not cover."""
    lines = []
    values = importance.compared.values
    if missing := [trial for trial in trials if trial.number not in values]:
        lines.append(f"Left out: {counted(len(missing), 'trial')} without such a value ({_states_text(missing)}).")
    if 0 < importance.count < len(values):
        lines.append(f"Computed from {importance.count:,} of {counted(len(values), 'trial')}, drawn at random.")
    if importance.capped:
        limit = number_text(importance.limit)
        lines.append(f"fANOVA takes {counted(importance.capped, 'value')} worse than {limit} for {limit}.")
    for name, count in importance.conditional.items():
        lines.append(f"fANOVA leaves out {name}, which exists in {count:,} of {counted(importance.count, 'trial')}.")
    others = [name for name in goal.space.to_json()["entries"] if name not in goal.space.parameters]
    if others:
        lines.append(f"Not drawn, and so without a share of their own: {', '.join(others)} (derived or fixed).")
    rows = [trials[number] for number in values]
    for name in goal.space.parameters:
        settings = [repr(trial.drawn[name]) for trial in rows if name in trial.drawn]
        if len(rows) > 1 and len(set(settings)) == 1:
            lines.append(f"{name} had one value in all of these trials.")
    return lines


def _best_trials(goal: Goal, trials: Sequence[Trial], front: Sequence[Trial]) -> Table:
    objectives = goal.objectives
    names = list(dict.fromkeys(name for trial in trials for name in trial.settings))
    ranked = sorted(trials, key=lambda trial: rank(trial, goal.maximize))
    if front:
        first = sorted(front, key=lambda trial: objectives.losses(trial.values or ()))
        numbers = {trial.number for trial in front}
        ranked = [*first, *(trial for trial in ranked if trial.number not in numbers)]
    rows = [
        (
            f"{trial.number}",
            str(trial.state),
            *(f"{value:.6g}" for value in trial.latest_values or ()),
            *([""] * len(objectives) if trial.latest_values is None else []),
            f"{trial.step:,}",
            format_seconds(trial.seconds),
            f"{trial.tokens:,}",
            *(truncate(setting_text(trial.settings[name]), 60) if name in trial.settings else "" for name in names),
        )
        for trial in ranked[:_BEST]
    ]
    columns = ("trial", "state", *objectives.names, "step", "time", "tokens", *names)
    return Table(columns, rows, name="The best trials")


def _errors(trials: Sequence[Trial]) -> tuple[Table, str]:
    """Returns the errors with their number and first trial, and a remark on those that are not listed."""
    counts = Counter(trial.error for trial in trials if trial.error)
    first = {trial.error: trial.number for trial in reversed(trials)}
    rows: list[tuple[str, ...]] = [
        (truncate(error, _LETTERS), f"{count:,}", f"{first[error]}") for error, count in counts.most_common(_ERRORS)
    ]
    others = sum(counts.values()) - sum(count for _, count in counts.most_common(_ERRORS))
    rest = len(counts) - len(rows)
    note = f"trials.jsonl has {counted(rest, 'other error')}, of {counted(others, 'trial')}." if rest else ""
    return Table(("error", "trials", "first"), rows, name="Errors", style="cards"), note
