"""The whole config: one ``posttrain.yaml``, one typed tree, each section defined where it is used."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from posttrain.data.config import DataConfig
from posttrain.evaluate.config import EvaluateConfig
from posttrain.evaluate.held_out import held_out_score
from posttrain.evaluate.metric_names import check_suites, metric_names
from posttrain.evaluate.scorers import SCORERS, scorer_name
from posttrain.label.config import LabelConfig
from posttrain.loop.adjust import Adjust, adjustment_rules, check_adjustments
from posttrain.loop.drift import DriftConfig
from posttrain.loop.gate import GateConfig
from posttrain.loop.hooks import DeployConfig
from posttrain.loop.triggers import TriggerConfig
from posttrain.loop.tuning import check_tuning
from posttrain.merge.config import MergeConfig
from posttrain.models.precision import Precision
from posttrain.models.sources import locate
from posttrain.models.task import TaskConfig
from posttrain.select.config import SelectConfig
from posttrain.store.config import CONFIG_FILE, StoreConfig
from posttrain.store.errors import UserError, shorten
from posttrain.store.extensions import add_module_folder
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.section import Section
from posttrain.store.workspace import Workspace
from posttrain.store.yaml_files import line_of, read_yaml
from posttrain.train.config import TrainConfig
from posttrain.train.key_aliases import KEY_ALIASES, VALUE_ALIASES
from posttrain.train.objectives.config import DpoConfig
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.tune.trainings.config import TuneConfig


class Config(Section):
    """The config of a workspace."""

    key_list = "posttrain config keys"
    key_aliases = KEY_ALIASES
    value_aliases = VALUE_ALIASES

    seed: int = Field(17, ge=0, description="Fixes every random choice.")
    rounds: int | None = Field(3, ge=1, description="Rounds after round 0; null: without an end.")
    model: str = Field(description="A folder, a .gguf file, a Hub id, `smollm2-135m` or `tiny`.")
    precision: Precision = Field(
        "auto",
        description="Precision that models are trained, scored, evaluated and asked in: bfloat16 or float32; auto: "
        "the faster one on the machine where the workspace first needs it, for good.",
    )
    stages: list[str] = Field(
        [], description="Stages of your own, by name or as `package.module:Class`; see docs/extending.md."
    )
    adjust: Adjust = Field(
        [],
        description="Rules over the values of a round that change keys for the rounds after it, such as `plateau >= 2: "
        "train.epochs + 2`; see docs/configuration.md.",
    )
    task: TaskConfig = Field(TaskConfig(), description="The task: system message, template, labels.")
    data: DataConfig = Field(description="The sources of records, and the steps that clean them.")
    select: SelectConfig = Field(SelectConfig(), description="The choice of records to label.")
    label: LabelConfig = Field(LabelConfig(), description="The annotator and the number of labels per round.")
    train: TrainConfig = Field(TrainConfig(), description="The training of a candidate.")
    tune: TuneConfig | None = Field(
        None,
        description="The search of the training's settings, in rounds whose data have drifted or grown; null: none.",
    )
    merge: MergeConfig = Field(MergeConfig(), description="The merging of a trained candidate with other models.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(), description="The suites and metrics that models are measured by."
    )
    gate: GateConfig = Field(GateConfig(), description="The rules that make a candidate the champion.")
    triggers: TriggerConfig = Field(TriggerConfig(), description="The rules that start a new round.")
    drift: DriftConfig = Field(
        DriftConfig(), description="The comparison of inputs that are new since the last round with those before."
    )
    deploy: DeployConfig = Field(
        DeployConfig(), description="The command and the webhook that run when the champion changes."
    )
    store: StoreConfig = Field(StoreConfig(), description="The places of metadata and artifacts.")

    @field_validator("tune")
    @classmethod
    def _defaults_of_the_training(cls, tune: TuneConfig | None, info: ValidationInfo) -> TuneConfig | None:
        train, task = info.data.get("train"), info.data.get("task")  # absent where it is wrong
        if tune is None or train is None or task is None:
            return tune
        return tune.for_training(_with_preference_objective(train, task), task.has_label_set)

    @field_validator("adjust", mode="before")
    @classmethod
    def _rules_name_changes(cls, rules: object) -> object:
        for rule in rules if isinstance(rules, list) else []:
            if isinstance(rule, str):
                raise ValueError(f"`{shorten(rule)}` names no key to change; write `RULE: train.learning_rate * 0.5`")
        return rules


def read_config(root: Path) -> Config:
    """Reads ``posttrain.yaml`` in ``root`` without looking at the files that it names.

    Raises:
        UserError: on the first thing that is wrong, with its key or line.
    """
    path = root / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"no {CONFIG_FILE} here", where=str(root), fix=_nearby_workspace(root) or f"posttrain init {root}"
        )
    # Before the config is read: its checks import the parts that it names.
    add_module_folder(root)
    with config_lines(root):
        return Config.read(read_yaml(path), CONFIG_FILE)


def _nearby_workspace(root: Path) -> str | None:
    """Returns a hint at the one workspace in or around a folder, for a command that was called in the wrong one."""
    try:
        inside = [path.parent for path in sorted(root.glob(f"*/{CONFIG_FILE}"))]
    except OSError:
        inside = []
    around = [parent for parent in root.absolute().parents if (parent / CONFIG_FILE).is_file()]
    folders = inside if len(inside) == 1 else around[:1]
    return f"there is one in {folders[0]}: add -w {shlex.quote(str(folders[0]))}" if folders else None


@contextmanager
def config_lines(root: Path, file: str = CONFIG_FILE) -> Iterator[None]:
    """Adds the line of a YAML file to errors that name a key of it.

    Args:
        root: Folder that the file's path starts from.
        file: Path of the file, as errors name it.
    """
    try:
        yield
    except UserError as error:
        in_file = error.where == file
        line = line_of(root / file, (error.key if in_file else error.where) or "")
        if line is None:
            raise
        where = f"{file}:{line}" if in_file else f"{file}:{line}: {error.where}"
        raise type(error)(error.what, where=where, fix=error.fix) from error.__cause__


@contextmanager
def open_workspace(root: Path, *, write: bool = False, checked: bool = True) -> Iterator[tuple[Workspace, Config]]:
    """Opens the workspace in ``root`` with its config, and closes it at the end.

    Args:
        root: Its folder.
        write: True to write: the store is made if nothing has run here yet.
        checked: False for commands that work even if files that the config names are missing.

    Raises:
        UserError: there is no workspace, nothing has run in it yet (without ``write``), or the config is wrong.
    """
    config = load_config(root) if checked else read_config(root)
    # A folder with a config is a workspace; the first command that writes creates the store.
    if not write and not (root / ".posttrain" / "format.json").exists():
        raise UserError("nothing has run here yet", where=str(root), fix=f"posttrain run -w {root}")
    # Around the work too: the store, the stages and files that the config names are opened only then.
    with (
        config_lines(root),
        Workspace.create(root, config.store) if write else Workspace.open(root, config.store, write=False) as workspace,
    ):
        yield workspace, config


def create_workspace(root: Path, config: bytes, store: StoreConfig = StoreConfig()) -> None:  # noqa: B008
    """Makes a folder a workspace with an empty store.

    Args:
        root: Its folder; made if missing.
        config: The content of its ``posttrain.yaml``.
        store: The section ``store`` of that.

    Raises:
        UserError: there is a workspace already, or the disk refused.
    """
    file = root / CONFIG_FILE
    if file.exists():
        raise UserError("a workspace is here already", where=str(file), fix=f"posttrain run -w {root}")
    make_folder(root)
    Workspace.create(root, store).close()
    # The config last: its presence says that a workspace is here, and a killed command can be run again.
    write_atomically(file, config)


def load_config(root: Path) -> Config:
    """Reads ``posttrain.yaml`` in ``root`` and checks it with the labels and models that it names; loads no model.

    Raises:
        UserError: on the first thing that is wrong, with its key or line.
    """
    config = read_config(root)
    with config_lines(root):
        task = config.task.with_labels_from(root)
        if task.kind == "preference":
            config = _with_preference_defaults(config, task)
        elif task.read_answer is not None:
            config = _with_scorer(config, task.kind)
            _check_form(config, task)
        has_labels = bool(task.label_set)
        check_suites(config.evaluate, has_labels)
        config.select.check(has_labels)
        config.select.check_models()
        metrics = metric_names(config.evaluate, has_labels)
        config.gate.check(metrics)
        check_adjustments(config, metrics)
        _check_objective(config.train.objective.name)
        _check_evaluation(config.train, task)
        config.label.check_models(has_labels, root)
        _check_pseudo(config)
        config.merge.check()
        _check_negatives(config.model_copy(update={"task": task}))
        locate(config.model, root)
        train = config.train.with_teacher_from(root)
        check_tuning(config.model_copy(update={"task": task}), root, has_labels)
    # The default rule depends on what the main suite pairs: a gain in log likelihood where perplexity is measured.
    main = SCORERS[scorer_name(next(iter(config.evaluate.suites.values())), has_labels)]
    gate = config.gate.with_default(f"gain.{main.paired}")
    evaluate = config.evaluate if _uses_latency(config) else config.evaluate.without_latency()
    return config.model_copy(update={"task": task, "train": train, "gate": gate, "evaluate": evaluate})


def _uses_latency(config: Config) -> bool:
    """Returns True if the config sets latency, or a rule uses it: to time hundreds of answers takes minutes."""
    names = config.gate.names | {name for rule, _ in adjustment_rules(config.adjust) for name in rule.names}
    return "latency" in config.evaluate.model_fields_set or any("latency" in name for name in names)


def _with_preference_defaults(config: Config, task: TaskConfig) -> Config:
    """Returns the config of a loop on preferences: DPO and the scorer `preference` where nothing else is set.

    Raises:
        UserError: the task has a label set, the annotator cannot compare answers, or the objective takes no pairs.
    """
    if task.label_set:
        fix = "remove the labels, or the kind"
        raise UserError("a loop on preferences has no label set", where="task.labels", fix=fix)
    if config.label.annotator != "people":
        what = f"`{config.label.annotator}` cannot choose between two answers"
        raise UserError(what, where="label.annotator", fix="use people")
    if config.label.suggest == "ensemble":
        what = "people compare two answers of the champion without a suggestion"
        raise UserError(what, where="label.suggest", fix="leave it out")
    train = _with_preference_objective(config.train, task)
    if train.spec.shape != "pair":
        what = f"`{train.objective.name}` does not train on pairs of answers"
        raise UserError(what, where="train.objective", fix="use dpo or another objective on pairs")
    return _with_scorer(config.model_copy(update={"train": train}), "preference")


def _with_scorer(config: Config, scorer: str) -> Config:
    """Returns the config with a scorer for the suites that name none."""
    suites = {
        name: suite if suite.scorer else suite.model_copy(update={"scorer": scorer})
        for name, suite in config.evaluate.suites.items()
    }
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"suites": suites})})


def _check_form(config: Config, task: TaskConfig) -> None:
    """Raises a UserError for settings that need one label per record, where answers have several parts."""
    if task.form is None:
        return
    label, select = config.label, config.select
    settings = {
        "label.pseudo": label.pseudo is not None,
        "label.accept_error": label.accept_error is not None,
        "label.suggest": label.teacher in ("linear", "vote"),
        "label.error_rate": bool(label.error_rate),
        "select.strategy": "margin" in (select.strategy, select.options.get("by")),
        "select.hard_cases": "boundary" in select.hard_cases,
        "select.hard_negatives": bool(select.hard_negatives),
        "evaluate.error_weight": bool(config.evaluate.error_weight),
    }
    for where, is_set in settings.items():
        if is_set:
            what = f"it needs one label per record, and answers of the kind `{task.kind}` have several parts"
            raise UserError(what, where=where, fix="leave it out")
    if task.kind == "spans" and any(step.name == "augment" for step in config.data.steps):
        what = "the step `augment` changes the text, and not the words that spans quote"
        raise UserError(what, where="data.steps", fix="leave it out")


def _check_evaluation(train: TrainConfig, task: TaskConfig) -> None:
    """Raises a UserError if a round's training cannot be evaluated as the config says."""
    if isinstance(train.evaluate.data, str):
        what, fix = "a round holds out a share of its training set", "write a number, such as 0.1"
        raise UserError(what, where="train.evaluate.data", fix=fix)
    held_out_score(train.evaluate.metrics, task)


def _with_preference_objective(train: TrainConfig, task: TaskConfig) -> TrainConfig:
    """Returns the training with DPO in a loop on preferences, where no objective is set."""
    if task.kind == "preference" and "objective" not in train.model_fields_set:
        return train.model_copy(update={"objective": DpoConfig()})
    return train


def _check_pseudo(config: Config) -> None:
    """Raises a UserError for pseudo-labels that the objective cannot train on."""
    shape = config.train.spec.shape
    if config.label.pseudo is not None and shape != "completion":
        what = f"`{config.train.objective.name}` trains on no records with a label and a weight"
        raise UserError(what, where="label.pseudo", fix="use sft, or null here")


def _check_negatives(config: Config) -> None:
    """Raises a UserError for hard negatives where the task has none, or the objective cannot train on pairs."""
    if not config.select.hard_negatives:
        return
    where = "select.hard_negatives"
    if not config.task.label_set:
        what = "hard negatives are records of another label, and free text has none"
        raise UserError(what, where=where, fix="set `task.labels`, or false here")
    if config.train.spec.shape not in ("pair", "labelled"):
        fix = "use train.objective: orpo or another on pairs, or false here"
        raise UserError(f"`{config.train.objective.name}` does not train on pairs of answers", where=where, fix=fix)


def _check_objective(name: str) -> None:
    """Raises a UserError for an objective whose model cannot answer."""
    # Suites measure answers; a reward model or a classifier has none, and the round would fail after its training.
    if OBJECTIVES[name].classifier:
        raise UserError(
            f"`{name}` makes a model that judges and does not answer, so no round can measure it",
            where="train.objective",
            fix="use posttrain train",
        )
