"""Ensembles in a workspace: finds their models, fits them on held-out records, and loads them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from posttrain.data.reading.data_files import content_digest
from posttrain.data.reading.reader import read
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import SCORERS, scorer_name
from posttrain.evaluate.scorers.base import read_examples
from posttrain.evaluate.suite import score_answers
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext, input_ids, model_key
from posttrain.loop.fetch_model import FetchModel
from posttrain.loop.history import finished_states, parent_dataset
from posttrain.loop.linear_head import fit_head
from posttrain.loop.model_registry import ModelRegistry, find_model
from posttrain.loop.stage import CachedWork
from posttrain.loop.suites import function_digests, suite_records
from posttrain.models.embedder_source import embedder_key
from posttrain.models.ensembles.config import EnsembleConfig, MemberConfig, check_task
from posttrain.models.linear_head import SETTINGS, LinearHead
from posttrain.models.sources import DEMO_MODEL, TINY_MODEL, locate
from posttrain.models.task import record_turns
from posttrain.store.errors import UserError
from posttrain.store.paths import locate_path

if TYPE_CHECKING:
    from posttrain.models.ensembles.ensemble import Ensemble
    from posttrain.models.ensembles.members import HeadModel, Member
    from posttrain.models.ensembles.texts import AnswerScore
    from posttrain.models.language_model import LanguageModel

ENSEMBLE = "ensemble"

_HEAD = "head"


@dataclass(frozen=True)
class ImportHead(CachedWork):
    """Copies a linear head from a folder.

    Args:
        folder: The folder.
    """

    folder: Path
    name = "import head"
    kind = _HEAD
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the digest of the folder's files."""
        return {"source": content_digest(self.folder, str(self.folder))}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the head."""
        head = LinearHead.load(self.folder)
        head.save(out)
        return {"fitted": True, **head.report}


@dataclass(frozen=True)
class FitEnsemble(CachedWork):
    """Fits what an ensemble's file wants fitted, and keeps it with the ids of the models.

    Args:
        config: The file.
        members: Ids of the models, in its order.
        folder: The folder of the file, which the path of its data is relative to.
    """

    config: EnsembleConfig
    members: tuple[str, ...]
    folder: Path
    name = ENSEMBLE
    kind = ENSEMBLE
    seeded = False

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the models, and digests of the held-out records and of the gate's sentence model."""
        config = self.config
        inputs = {f"model {number}": id for number, id in enumerate(self.members)}
        if config.data is not None:
            inputs["data"] = content_digest(locate_path(self.folder, config.data), config.data)
        if config.method == "gate":
            inputs["embedder"] = embedder_key(config.embedder)
        if suite := _scoring_suite(context.config, config):
            digests = function_digests(context.config)
            inputs |= {key: digest for key, digest in digests.items() if key == f"{suite[0]}.function"}
        return inputs

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the file, the columns, the task, the precision, and in free text the suite that scores."""
        columns = {"columns": context.config.data.columns} if self.config.data is not None else {}
        suite = _scoring_suite(context.config, self.config)
        scoring = {"suite": suite[1].model_dump(mode="json")} if suite else {}
        return {"ensemble": self.config.model_dump(mode="json"), **columns, **scoring, **model_key(context)}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Runs every model on the held-out records, if there are any, and fits."""
        from posttrain.models.ensembles.ensemble import Ensemble

        ensemble = Ensemble(self.config, _members(context, self.config, self.members), context.config.task)
        if self.config.needs_data:
            records = held_out_records(context, self.config, self.folder)
            prompts = [record_turns(row) for row in records.select(["prompt", "text"]).to_pylist()]
            answers = [str(answer) for answer in records["completion"].to_pylist()]
            score = _answer_score(context.config, self.config, records)
            ensemble = ensemble.fit(prompts, answers, score)
        ensemble.save(out)
        assert ensemble.parameters is not None, "they are fitted"
        return {
            "method": self.config.method,
            "models": [[entry.model, id] for entry, id in zip(self.config.models, self.members, strict=True)],
            "fitted": ensemble.parameters.report,
        }


def _scoring_suite(config: Config, ensemble: EnsembleConfig, where: str = "") -> tuple[str, SuiteConfig] | None:
    """Returns the suite whose scorer scores free-text answers to held-out records, and its name.

    Args:
        config: The workspace's config.
        ensemble: The ensemble's file.
        where: Its name in errors.

    Returns:
        None where nothing is fitted, and for a task with labels.

    Raises:
        UserError: there is no such suite, or its scorer scores no written answers.
    """
    if config.task.label_set or not ensemble.needs_data:
        return None
    suites, key = config.evaluate.suites, f"{where}: suite"
    name = ensemble.suite or next(iter(suites))
    if name not in suites:
        fix = f"one of {', '.join(suites)}"
        raise UserError(f"there is no suite `{name}` in evaluate.suites", where=key, fix=fix)
    scorer = scorer_name(suites[name], has_labels=False)
    if not SCORERS[scorer].ensembles:
        what = f"scorer `{scorer}` of suite `{name}` scores no written answers"
        raise UserError(what, where=key, fix="name a suite with another scorer")
    return name, suites[name]


def _answer_score(config: Config, ensemble: EnsembleConfig, records: pa.Table) -> "AnswerScore | None":
    """Returns the function that scores free-text answers to held-out records; None where `_scoring_suite` is."""
    scoring = _scoring_suite(config, ensemble)
    if scoring is None:
        return None
    name, suite = scoring
    where = f"evaluate.suites.{name}"
    examples = read_examples(records, where)
    return lambda answers: score_answers(suite, config.task, examples, answers, where).score


def fit_ensemble(context: RoundContext, file: Path, name: str, dataset: str | None = None) -> str:
    """Fits an ensemble, or finds the finished one; returns its id.

    Args:
        context: The round.
        file: The ensemble's file.
        name: Its name in errors.
        dataset: Id of the training set whose labels the linear head learns from; that of the next round by default.

    Raises:
        UserError: the file is wrong, a model is missing, or a model learned from the held-out records.
    """
    config = EnsembleConfig.load(file, name)
    check_ensemble(config, context, name)
    folder = file.absolute().parent
    dataset = dataset or (parent_dataset(context.workspace) if finished_states(context.workspace) else None)
    if config.data is not None:
        _check_not_learned(context, config, folder, dataset)
    ids = [_member_id(context, entry, folder, dataset, name) for entry in config.models]
    return context.run(FitEnsemble(config, tuple(ids), folder)).id


def check_ensemble(config: EnsembleConfig, context: RoundContext, name: str) -> None:
    """Raises a UserError if the ensemble's method cannot answer the task, or the suite that it names cannot score."""
    check_task(config, bool(context.config.task.label_set), name)
    _scoring_suite(context.config, config, name)


def load_ensemble(context: RoundContext, id: str) -> "Ensemble":
    """Returns an ensemble; its models are loaded when they answer."""
    from posttrain.models.ensembles.ensemble import Ensemble, read_config

    folder = context.path(id)
    ids = [pair[1] for pair in context.artifact(id).meta["models"]]
    return Ensemble.read(folder, _members(context, read_config(folder), ids), context.config.task)


def load_model(context: RoundContext, id: str) -> "LanguageModel | Ensemble":
    """Loads a model, or an ensemble by its id."""
    return load_ensemble(context, id) if context.artifact(id).kind == ENSEMBLE else context.model(id)


def held_out_records(context: RoundContext, config: EnsembleConfig, folder: Path) -> pa.Table:
    """Reads the records that an ensemble is fitted on: a RECORD table, each with an answer.

    Raises:
        UserError: the file is missing, or a record is bad or has no answer.
    """
    assert config.data is not None, "there is data"
    path = locate_path(folder, config.data)
    if not path.exists():
        raise UserError(f"no such file: {config.data}", where="data", fix="check the path")
    columns = config.columns if config.columns is not None else context.config.data.columns
    read_answer = context.config.task.read_answer
    records = pa.concat_tables(read(path, columns, name=config.data, read_answer=read_answer))
    for row in records.select(["completion", "line"]).to_pylist():
        if row["completion"] is None:
            raise UserError("has no answer", where=f"{config.data}:{row['line']}", fix="add it, or remove the record")
    return records


def check_not_measured(context: RoundContext, file: Path, test: str) -> None:
    """Checks that no suite measures on a record that the ensemble is fitted on.

    Args:
        context: The round.
        file: The ensemble's file.
        test: Id of the test set.

    Raises:
        UserError: one does.
    """
    config = EnsembleConfig.load(file)
    if config.data is None:
        return
    own = set(held_out_records(context, config, file.absolute().parent)["input_id"].to_pylist())
    for name, suite in context.config.evaluate.suites.items():
        shared = own & set(suite_records(context, suite, test)["input_id"].to_pylist())
        if shared:
            what = f"{len(shared)} of its {len(own)} inputs are in suite `{name}`, which would measure what was fitted"
            raise UserError(what, where=config.data, fix="hold out other records")


def _check_not_learned(context: RoundContext, config: EnsembleConfig, folder: Path, dataset: str | None) -> None:
    """Raises a UserError if a model of the workspace learned from the records that the ensemble is fitted on."""
    learned = [entry.model for entry in config.models if learns_here(entry.model)]
    if not learned or dataset is None:
        return
    own = set(held_out_records(context, config, folder)["input_id"].to_pylist())
    if shared := own & input_ids(context, dataset):
        what = f"{len(shared)} of its {len(own)} inputs are in the training set that `{learned[0]}` learned from"
        raise UserError(what, where=str(config.data), fix="hold out other records")


def learns_here(model: str) -> bool:
    """Returns whether a model, as an ensemble's file names it, may have learned from this workspace's labels."""
    outside = (TINY_MODEL, DEMO_MODEL, "base")
    return not (model in outside or "/" in model or model.endswith(".gguf"))


def _member_id(context: RoundContext, entry: MemberConfig, folder: Path, dataset: str | None, where: str) -> str:
    """Returns the id of a model; fetches one from outside of the workspace, and trains the linear head."""
    name, state = entry.model, context.state
    if name == "linear":
        head = fit_head(context, dataset) if dataset else None
        if head is None:
            fix = "run rounds first, and see label.embedder"
            raise UserError("there is no linear head: no labels, or no sentence model", where=where, fix=fix)
        return head
    if name == "base":
        return state.base or context.run(FetchModel(context.config.model)).id
    if name == "champion" and (champion := state.champion or ModelRegistry(context.workspace).champion_id):
        return champion
    path = locate_path(folder, name)
    if (path / SETTINGS).is_file():
        return context.run(ImportHead(path.resolve())).id
    if name in (TINY_MODEL, DEMO_MODEL):
        return context.run(FetchModel(name)).id
    if path.exists() or "/" in name or name.endswith(".gguf"):
        try:
            source = locate(name, folder)
        except UserError as error:
            raise UserError(error.what, where=f"{where}: {name}", fix=error.fix) from None
        # A path becomes absolute: the fetched model is named by it, whichever folder the ensemble's file is in.
        return context.run(FetchModel(source)).id
    try:
        return find_model(context.workspace, name)
    except UserError as error:
        raise UserError(error.what, where=f"{where}: models", fix=error.fix) from None


def _members(context: RoundContext, config: EnsembleConfig, ids: "list[str] | tuple[str, ...]") -> "list[Member]":
    from posttrain.models.ensembles.members import Member

    def loader(entry: MemberConfig, id: str) -> Any:
        if context.artifact(id).kind == _HEAD:
            return lambda: _load_head(context, entry, id)
        return lambda: context.model(id)

    return [Member(entry.model, loader(entry, id)) for entry, id in zip(config.models, ids, strict=True)]


def _load_head(context: RoundContext, entry: MemberConfig, id: str) -> "HeadModel":
    from posttrain.models.embedder import Embedder
    from posttrain.models.ensembles.members import HeadModel

    name = entry.embedder or str(context.config.label.embedder)
    return HeadModel(LinearHead.load(context.path(id)), Embedder.load(name))
