"""The page of a study: what mattered, what was gained, and every trial's fate."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from posttrain.report.charts.bars import format_seconds
from posttrain.report.charts.chart import truncate
from posttrain.report.formatting import number_text, percent_text
from posttrain.tune.events import Event
from posttrain.tune.goal import Goal
from posttrain.tune.importance import Importance, measure_importance
from posttrain.tune.lint import check_edges, check_space
from posttrain.tune.losses import FEWEST
from posttrain.tune.objectives import Objective, Objectives
from posttrain.tune.trial import Trial, TrialState, best_trial, rank, with_objective
from posttrain.web.front_view import front_charts, hypervolume_chart
from posttrain.web.page import PAGE_BYTES, Table, Tile, now_text, render_page, write_page
from posttrain.web.study_view import setting_text, study_view

_BEST = 20  # rows of the table of trials
_ERRORS = 20  # different errors that are listed
_LETTERS = 300  # of an error

_FIT = 0.3  # R² of the forest below which shares are no finding

_SECOND = 0.1  # share from which the second setting is named, too


def render_study(
    goal: Goal, trials: Sequence[Trial], events: Sequence[Event], name: str, warm_start: Sequence[str] = ()
) -> tuple[str, str]:
    """Renders the page as HTML of less than 2 MB, as far as fewer points can make it so.

    Args:
        goal: what the study searches.
        trials: its trials, by number.
        events: what happened, in its order; empty of a search whose times were not kept.
        name: of the study.
        warm_start: sentences on how it was started.

    Returns:
        The page, and its first sentence.
    """
    parts = _split(goal, trials)
    best = goal.best_trial(trials)
    front = goal.objectives.front(trials) if len(parts) > 1 else []
    sentence = summarize(goal, trials, parts[0].importance)
    if front:
        sentence = _summarize_front(goal, trials, front, parts)
    volume, volume_note = hypervolume_chart(goal.objectives, trials) if front else (None, "")
    page = ""
    for detail in (1.0, 0.5, 0.25, 0.1):
        charts, front_note = front_charts(goal.objectives, trials, front, best, detail)
        page = render_page(
            "study_report.html",
            name=name,
            sentence=sentence,
            headline=_headline(goal, trials, parts[0].importance, best, front),
            warnings=_warnings(goal, best),
            settings=[] if best is None else [(key, setting_text(value)) for key, value in best.settings.items()],
            best=best,
            warm_start=[f"{text[0].upper()}{text[1:]}." for text in warm_start],
            front=front,
            front_charts=charts,
            notes=[note for note in (front_note, volume_note) if note],
            volume=volume,
            objectives=[_objective_text(item) for item in goal.objectives.items],
            choose=goal.objectives.choose,
            within_limits=best is None or not front or goal.objectives.meets_limits(best),
            objective_parts=[part.render(events, detail / len(parts)) for part in parts],
            unvalued=_unvalued(trials),
            timed=bool(events) or not trials,
            trials=_best_trials(goal, trials, front),
            states=_states(trials),
            errors=_errors(trials),
            created=now_text(),
        )
        if len(page.encode("utf-8", "replace")) < PAGE_BYTES:
            break
    return page, sentence


@dataclass(frozen=True)
class _ObjectiveReport:
    """A study of one objective, which each of several is for most charts.

    Args:
        goal: of it.
        trials: with the values of the objective.
        importance: of the settings for it.
    """

    goal: Goal
    trials: Sequence[Trial]
    importance: Importance

    def render(self, events: Sequence[Event], detail: float) -> dict[str, Any]:
        """Returns what the template shows of the objective."""
        importance = self.importance
        return {
            "name": self.goal.objective,
            "view": study_view(self.goal, self.trials, events, importance, detail),
            "compared": _values_text(importance),
            "left_out": _left_out(self.goal, self.trials, importance),
            "importance": importance,
            "interactions": percent_text(max(0.0, 1 - sum(importance.shares.values()))),
            "fit": f"{importance.fit:.2f}",
        }


def _split(goal: Goal, trials: Sequence[Trial]) -> list[_ObjectiveReport]:
    """Returns the study of each objective."""
    parts = []
    for index, objective in enumerate(goal.objectives.items):
        values = [with_objective(trial, index) for trial in trials] if len(goal.objectives) > 1 else trials
        importance = measure_importance(goal.space, values, maximize=objective.maximize)
        single = Goal(goal.space, Objectives((objective,)), goal.identity)
        parts.append(_ObjectiveReport(single, values, importance))
    return parts


def write_study(
    path: Path, goal: Goal, trials: Sequence[Trial], events: Sequence[Event], name: str, warm_start: Sequence[str] = ()
) -> str:
    """Writes the page atomically to ``path``, whose folder exists, and returns its first sentence.

    Raises:
        UserError: the disk refused.
    """
    page, sentence = render_study(goal, trials, events, name, warm_start)
    write_page(path, page)
    return sentence


def summarize(goal: Goal, trials: Sequence[Trial], importance: Importance) -> str:
    """Says in a sentence what mattered and what was gained, or why that cannot be said."""
    best, compared = best_trial(trials, maximize=goal.maximize), importance.compared
    if not trials:
        return "No trial has been started."
    if best is None or best.latest is None:
        return f"None of {_count(len(trials), 'trial')} has a value: {_states_text(trials)}."
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
    return f"{len(front):,} of {_count(finished, 'finished trial')} are on the front; {chosen}. {'; '.join(mattered)}."


def _objective_text(objective: Objective) -> str:
    limit = "" if objective.limit is None else f" (limit {number_text(objective.limit)})"
    return f"{objective.text}{limit}"


def _mattered(importance: Importance) -> str:
    compared = importance.compared.values
    over = f"{importance.count:,} trials{_at_step(importance)}"
    if len(compared) < FEWEST:
        comparable = f"{_count(len(compared), 'trial')} with comparable values"
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


def _count(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


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
        tiles.append((f"{len(front):,}", "on the front", f"of {_count(finished, 'finished trial')}"))
    elif best is not None and best.latest is not None:
        at = "" if best.state is TrialState.FINISHED else f", {best.state} at step {best.step}"
        tiles.append((number_text(best.latest), f"best {goal.objective}", f"trial {best.number}{at}"))
    if len(compared) > 1 and not front:
        middle = number_text(median(compared.values()))
        tiles.append((middle, "median", f"of {_count(len(compared), 'trial')}{_at_step(importance)}"))
    tiles.append((f"{len(trials):,}", "trials", _states_text(trials)))
    if work := sum(trial.seconds for trial in trials):
        tiles.append((format_seconds(work), "of work", "all trials together"))
    if tokens := sum(trial.tokens for trial in trials):
        tiles.append((number_text(float(tokens)), "tokens", "of all trials"))
    return tuple(tiles)


def _warnings(goal: Goal, best: Trial | None) -> list[str]:
    if best is None:
        return []
    warnings = [*check_edges(goal.space, best), *check_space(goal.space)]
    texts = [warning.replace("`", "") for warning in warnings]
    return [f"{text[0].upper()}{text[1:]}." for text in texts]


def _values_text(importance: Importance) -> str:
    step = importance.compared.step
    return "the final values of finished trials" if step is None else f"the values at step {step:,}"


def _unvalued(trials: Sequence[Trial]) -> str:
    missing = [trial for trial in trials if trial.latest is None]
    return f"Not drawn: {_count(len(missing), 'trial')} without a value ({_states_text(missing)})." if missing else ""


def _left_out(goal: Goal, trials: Sequence[Trial], importance: Importance) -> list[str]:
    """Lists which trials and settings importance does not cover."""
    lines = []
    values = importance.compared.values
    if missing := [trial for trial in trials if trial.number not in values]:
        lines.append(f"Left out: {_count(len(missing), 'trial')} without such a value ({_states_text(missing)}).")
    if 0 < importance.count < len(values):
        lines.append(f"Computed from {importance.count:,} of {len(values):,} trials, drawn at random.")
    if importance.capped:
        limit = number_text(importance.limit)
        lines.append(f"fANOVA takes {_count(importance.capped, 'value')} worse than {limit} for {limit}.")
    for name, count in importance.conditional.items():
        lines.append(f"fANOVA leaves out {name}, which exists in {count:,} of {importance.count:,} trials.")
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
    return ("trial", "state", *objectives.names, "step", "time", "tokens", *names), rows


def _states(trials: Sequence[Trial]) -> Table:
    rows: list[tuple[str, ...]] = []
    for state in TrialState:
        of_state = [trial for trial in trials if trial.state is state]
        if of_state:
            seconds, tokens = sum(t.seconds for t in of_state), sum(t.tokens for t in of_state)
            rows.append((str(state), f"{len(of_state):,}", format_seconds(seconds), f"{tokens:,}"))
    return ("state", "trials", "time", "tokens"), rows


def _errors(trials: Sequence[Trial]) -> tuple[Table, str]:
    """Returns the errors with their number and first trial, and a remark on those that are not listed."""
    counts = Counter(trial.error for trial in trials if trial.error)
    first = {trial.error: trial.number for trial in reversed(trials)}
    rows: list[tuple[str, ...]] = [
        (truncate(error, _LETTERS), f"{count:,}", f"{first[error]}") for error, count in counts.most_common(_ERRORS)
    ]
    others = sum(counts.values()) - sum(count for _, count in counts.most_common(_ERRORS))
    rest = len(counts) - len(rows)
    note = f"trials.jsonl has {_count(rest, 'other error')}, of {_count(others, 'trial')}." if rest else ""
    return (("error", "trials", "first"), rows), note
