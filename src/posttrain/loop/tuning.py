"""The settings that rounds have tuned: which of them hold, and what a search of them decided."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.loop.adjust import adjustment_rules, config_value
from posttrain.loop.drift import VALUE_NAMES as DRIFT_VALUES
from posttrain.store.errors import UserError, suggest
from posttrain.store.expression import Rule, parse
from posttrain.store.message import Message
from posttrain.store.paths import locate_path
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.config import TEACHER_KEY
from posttrain.tune.runs import check_memory
from posttrain.tune.schedulers.registry import make_scheduler
from posttrain.tune.trainings.checks import check_search
from posttrain.tune.trainings.config import VALUE_NAMES, TuneConfig
from posttrain.tune.trainings.settings import RANKS_PREFIX, SETTING_PREFIX, apply_settings

if TYPE_CHECKING:
    from posttrain.loop.config import Config
    from posttrain.loop.state import RoundState

STAGE = "tune"
"""Name of the stage, under which a round's state has its `Tuning`, or ``why_not``: the reason for none."""

_WHERE, _WHEN = "tune.space", "tune.when"

_DECIDED_BEFORE = ("train.start", "train.objective.name", TEACHER_KEY, "train.phases", "train.weight")
"""Keys that stages before the search depend on, or that all its trainings have in common."""


@dataclass(frozen=True)
class Tuning:
    """The outcome of one round's search of settings, as the round's state records it.

    Attributes:
        round: Number of the round.
        rule: Text of the rule; ``values`` that it was decided by.
        records: Labels of the training set; ``held_out`` of them were measured on.
        metric: Metric that decided; ``maximize`` whether greater is better.
        settings: Settings that hold from then on, by key; others that only help the space are among them.
        before: Values of the keys until then; ``configured`` their values in ``posttrain.yaml`` at that time.
        value: Metric of the settings; ``value_before`` of those before, None where their training failed.
        trials: Trials of the study; ``trained`` is their work in whole trainings, with that of the settings before.
        warm_start: Sentences on what it learned from earlier rounds.
    """

    round: int
    rule: str
    values: str
    records: int
    held_out: int
    metric: str
    maximize: bool
    settings: Mapping[str, Any]
    before: Mapping[str, Any]
    configured: Mapping[str, Any]
    value: float | None
    value_before: float | None
    trials: int
    trained: float
    warm_start: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return asdict(self)

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Values before and after, by key, of those that have changed."""
        pairs = {key: (value, self.settings.get(key, value)) for key, value in self.before.items()}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def sentences(self) -> list[str]:
        """Says what changed, by what rule, how much better it is, and what was spent."""
        spent = Message("{trials} trials, the work of {trained:g} trainings", trials=self.trials, trained=self.trained)
        measured = Message("held-out {metric} of {count} records", metric=self.metric, count=self.held_out)
        changes = [
            Message("tuned {key} {old} → {new}", key=key, old=_number(old), new=_number(new))
            for key, (old, new) in self.changes.items()
        ]
        reason = Message("tuned by the rule {rule} ({values})", rule=self.rule, values=self.values)
        return [Message.joined("; ", [self._outcome, measured, spent]), *changes, *self.warm_start, reason]

    @property
    def _outcome(self) -> Message:
        if not self.changes and self.value is None:
            return Message("tuned, and the settings stay: no training has a value")
        after = _number(self.value)
        if not self.changes:
            return Message("tuned, and the settings stay: nothing better than {value}", value=after)
        if self.value_before is None:
            return Message("tuned from none to {after}", after=after)
        return Message("tuned from {before} to {after}", before=_number(self.value_before), after=after)


def round_sentence(text: str) -> str:
    """Returns a sentence on a study's warm start as one on a round, whose subject is not the study."""
    return f"the search {text}" if text.startswith("starts ") else text


def tuning_of(state: "RoundState") -> Tuning | None:
    """Returns what a round's search of settings decided; None where there was none."""
    values = state.results.get(STAGE) or {}
    return Tuning(**values) if "settings" in values else None


def last_tuned(states: Sequence["RoundState"]) -> Tuning | None:
    """Returns what the last search in these rounds decided."""
    return next((tuning for state in reversed(states) if (tuning := tuning_of(state))), None)


def with_tuning(config: "Config", tuning: Tuning | None) -> "Config":
    """Returns the config with the settings that a search left.

    A key that is not searched any more, or that the user has set since, does not count.

    Args:
        config: The config as ``posttrain.yaml`` and the rules of ``adjust`` have it.
        tuning: The search; None where nothing was tuned yet.

    Raises:
        UserError: a setting does not fit the config, which has changed since.
    """
    if tuning is None or config.tune is None:
        return config
    settings = {
        key: value
        for key, value in tuning.settings.items()
        if key in tuned_keys(config.tune) and tuning.configured.get(key) == tuned_value(config, key)
    }
    if not settings:
        return config
    values = apply_settings({"train": config.train.model_dump(mode="json", exclude_unset=True)}, settings)
    try:
        train = TrainConfig.read(values["train"], _WHERE)
    except UserError as error:
        listed = ", ".join(f"{key} = {value}" for key, value in settings.items())
        what = f"{error.what}, with {listed}, which an earlier round has tuned"
        raise UserError(what, where=_WHERE, fix="set the key again, or leave it out of the space") from None
    return config.model_copy(update={"train": train})


def tuned_keys(tune: TuneConfig) -> list[str]:
    """Returns the keys of the config that the space sets."""
    return [key for key in tune.space if key.startswith(SETTING_PREFIX)]


def tuned_value(config: "Config", key: str) -> Any:
    """Returns the value in force of a key that the space sets.

    A pattern of LoRA's ranks that the config lacks has the rank of the rest: that changes no training.
    """
    if key.startswith(RANKS_PREFIX):
        lora = config.train.lora
        return lora.ranks.get(key.removeprefix(RANKS_PREFIX), lora.rank)
    return config_value(config, key)


def tuning_rule(tune: TuneConfig) -> Rule:
    """Parses the rule that starts a search.

    Raises:
        UserError: it cannot be read, or names nothing that is known.
    """
    rule, names = parse(tune.when, _WHEN), (*VALUE_NAMES, *DRIFT_VALUES)
    for name in rule.names:
        if name not in names:
            raise UserError(f"rule `{rule.text}`: no value `{name}`", where=_WHEN, fix=suggest(name, names))
    if not rule.names:
        raise UserError(f"rule `{rule.text}` names no value", where=_WHEN, fix=f"use {', '.join(names)}")
    return rule


def check_tuning(config: "Config", root: Path, has_labels: bool) -> None:
    """Checks the section ``tune`` of a loop before any work.

    Args:
        config: The config.
        root: Folder that the held-out file is relative to.
        has_labels: True for a task with a label set.

    Raises:
        UserError: space, rule, budget, sampler, scheduler, metric or file cannot be used, or a rule of ``adjust``
            changes a key that is searched.
    """
    tune = config.tune
    if tune is None:
        return
    if tune.budget is None:
        raise UserError("says nothing of what it may spend", where="tune.budget", fix="give one, such as 20 trials")
    tune.read_budget()
    if len(tune.objectives) > 1:
        fix = "name a metric, or use posttrain tune beside the loop"
        raise UserError("a round chooses settings by one metric", where="tune.objectives", fix=fix)
    check_memory(tune.limits, tune.engine, "tune.limits")
    if tune.storage is not None:
        raise UserError("a round keeps its study in the workspace", where="tune.storage", fix="leave it out")
    if tune.one_shot:
        what = "leaves a model, and a round trains its own"
        raise UserError(what, where="tune.one_shot", fix="leave it out, or use posttrain tune beside the loop")
    if tune.warm_start is not None:
        what = "a round starts from the studies of the rounds before it"
        raise UserError(what, where="tune.warm_start", fix="leave it out")
    values = {"data": "pool", "model": config.model, "task": config.task.model_dump(mode="json")}
    base = {**values, "seed": config.seed, "train": config.train.model_dump(mode="json")}
    check_search(tune, base, config.train, has_labels=has_labels)
    for key in tune.space:
        if any(_overlap(key, decided) for decided in _DECIDED_BEFORE):
            raise UserError(f"`{key}` is the same for a whole round", where=_WHERE, fix="leave it out")
    for _, changes in adjustment_rules(config.adjust):
        for change in changes:
            for searched in tune.space:
                if _overlap(searched, change.key):
                    what = f"`{change.key}` would have two owners, a rule here and `{searched}` of tune.space"
                    raise UserError(what, where="adjust", fix="leave it to one of them")
    tuning_rule(tune)
    if make_scheduler(tune.scheduler).has_forks:
        what = "finds a schedule of settings, which the round's training cannot follow"
        raise UserError(what, where="tune.scheduler", fix="use asha, or posttrain tune beside the loop")
    if tune.held_out.share is None and not locate_path(root, tune.held_out.data).exists():
        raise UserError(
            f"no such file: {tune.held_out.data}", where="tune.held_out", fix="check the path, or hold out 10%"
        )


def _overlap(first: str, second: str) -> bool:
    """Returns whether two keys are the same, or one lies within the other."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
