"""Searches for prompts that fool the champion, starting from records with an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from posttrain.data.reading.reader import read
from posttrain.data.records.record import RECORD, concat
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import scorer_name
from posttrain.evaluate.suite import run_suite
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.history import finished_rounds, parent_dataset
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.stages.collect import collect
from posttrain.loop.suites import measured_on, suite_records
from posttrain.models.embedder import Embedder
from posttrain.models.embedder_source import MINILM
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import Turns, record_turns
from posttrain.select.adversarial.examples import Judge, JudgedAnswers, LabelledPrompt, SearchOutcome, SearchSettings
from posttrain.select.adversarial.problem import cosine_similarity
from posttrain.select.adversarial.search import check_attack, search
from posttrain.store.errors import UserError, suggest
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class SearchResult:
    """The examples of a search, and its starting point.

    Attributes:
        outcome: The examples and their counts.
        champion: Id of the model.
        measured: Number of records that were left out because models are measured on them.
        columns: Names of the columns in the loop's files.
    """

    outcome: SearchOutcome = field(repr=False)
    champion: str
    measured: int
    columns: dict[str, str]


def search_adversarial(
    workspace: Workspace,
    config: Config,
    settings: SearchSettings,
    *,
    suite: str | None = None,
    file: Path | None = None,
) -> SearchResult:
    """Searches for adversarial prompts of the champion.

    Args:
        workspace: The workspace.
        config: Its config.
        settings: Method and limits of the search.
        suite: Name of the suite whose records and scorer the search uses; the examples must not be trained on.
        file: File of labelled records to start from; without a suite and a file, those of the loop. Records that models
            are measured on are left out.

    Raises:
        UserError: there is no champion, no such suite, file or method, or no record that the champion answers right.
    """
    check_attack(settings.method)
    main = suite or next(iter(config.evaluate.suites))
    if main not in config.evaluate.suites:
        raise UserError(f"no suite `{main}`", where="--suite", fix=suggest(main, config.evaluate.suites))
    scored_by = config.evaluate.suites[main]
    if scorer_name(scored_by, bool(config.task.label_set)) == "perplexity":
        raise UserError(f"suite `{main}` is scored by perplexity, which calls no answer right", where="--suite")
    champion = ModelRegistry(workspace).champion
    if champion is None or not finished_rounds(workspace):
        raise UserError("there is no champion yet", fix="posttrain run")
    # First: a file that cannot be read, or a missing embedder, ends the call at once.
    columns, read_answer = config.data.columns, config.task.read_answer
    file_records = concat(list(read(file, columns, name=str(file), read_answer=read_answer))) if file else None
    embedder = Embedder.load(MINILM)
    with workspace.work():
        context = RoundContext(workspace, config, len(finished_rounds(workspace)), in_round=False)
        test = collect(context).test
    measured = 0
    if suite is not None:
        records = suite_records(context, scored_by, test.id)
    else:
        labelled_records = context.dataset(parent_dataset(workspace)).records if file_records is None else file_records
        # Examples are to be trained on, and must not overlap with evaluation records.
        records = _not_measured(labelled_records, measured_on(config, context.dataset(test.id).records, workspace.root))
        measured = labelled_records.num_rows - records.num_rows
    labelled = _labelled(records)
    if not labelled:
        raise UserError("there are no labelled records to start from", fix="name a file with --records")
    lm = context.model(champion.model_id)
    judge = _judge(lm, records, scored_by, main)
    outcome = search(lm, labelled, judge, cosine_similarity(embedder), settings)
    return SearchResult(outcome, champion.model_id, measured, config.data.columns or {})


def _not_measured(records: pa.Table, measured: dict[str, pa.Table]) -> pa.Table:
    measured_inputs = {id for table in measured.values() for id in table["input_id"].to_pylist()}
    return records.filter(pa.array([id not in measured_inputs for id in records["input_id"].to_pylist()], pa.bool_()))


def _labelled(records: pa.Table) -> list[LabelledPrompt]:
    """Returns the records with a prompt and an answer, each once."""
    rows = records.select(["id", "prompt", "text", "completion"]).to_pylist()
    answered = {row["id"]: (record_turns(row), row["completion"]) for row in rows if row["completion"] is not None}
    # Plain text has no prompt that could be changed.
    return [LabelledPrompt(id, prompt, answer) for id, (prompt, answer) in answered.items() if prompt]


def _judge(lm: LanguageModel, records: pa.Table, suite: SuiteConfig, name: str) -> Judge:
    """Builds the function that answers prompts and scores the answers with the suite's scorer; 1 is right."""
    rows = {row["id"]: row for row in records.to_pylist()}

    def judge(originals: Sequence[LabelledPrompt], prompts: Sequence[Turns]) -> JudgedAnswers:
        # Numbered again: one record stands for many changed prompts, and a suite needs distinct ids.
        changed = [
            {**rows[record.id], "id": str(number), "prompt": prompt, "text": None}
            for number, (record, prompt) in enumerate(zip(originals, prompts, strict=True))
        ]
        result = run_suite(lm, pa.Table.from_pylist(changed, schema=RECORD), suite, name, full=True)
        scores = result.predictions["score"].to_pylist()
        return JudgedAnswers(result.predictions["predicted"].to_pylist(), [score >= 1 for score in scores])

    return judge
