"""A search for prompts that fool the champion, among records whose answers are known."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from posttrain.data.reading.reader import read
from posttrain.data.records.schema import RECORD, concat
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import scorer_name
from posttrain.evaluate.suite import run_suite
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.history import carried_dataset, finished_rounds
from posttrain.loop.registry import Registry
from posttrain.loop.stages.collect import collect
from posttrain.loop.stages.evaluate import suite_records
from posttrain.loop.suites import measured_on
from posttrain.models.embedder import MINILM, Embedder
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import Turns, record_turns
from posttrain.select.adversarial.examples import Judge, JudgedAnswers, LabelledPrompt, SearchOutcome, SearchSettings
from posttrain.select.adversarial.problem import cosine_similarity
from posttrain.select.adversarial.search import check_attack, search
from posttrain.store.errors import UserError, suggest
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class SearchResult:
    """What was found, and on what.

    Attributes:
        champion: the model's id.
        measured: records that were left out, as models are measured on them.
        columns: what the loop's files call their columns.
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
    """Look for adversarial prompts of the champion.

    Args:
        workspace: the workspace.
        config: its config.
        settings: how far to go.
        suite: take the records of this suite, by its scorer. What is made of them must not be trained on.
        file: take the labelled records of this file. Without both, those that the loop has labels of. Of neither is
            one taken that models are measured on.

    Raises:
        UserError: there is no champion, no such suite, file or method, or no record that the champion answers rightly.
    """
    check_attack(settings.method)
    main = suite or next(iter(config.evaluate.suites))
    if main not in config.evaluate.suites:
        raise UserError(f"no suite `{main}`", where="--suite", fix=suggest(main, config.evaluate.suites))
    scored_by = config.evaluate.suites[main]
    if scorer_name(scored_by, bool(config.task.label_set)) == "perplexity":
        raise UserError(f"suite `{main}` is scored by perplexity, which calls no answer right", where="--suite")
    champion = Registry(workspace).champion
    if champion is None or not finished_rounds(workspace):
        raise UserError("there is no champion yet", fix="posttrain run")
    given = concat(list(read(file, config.data.columns, name=str(file)))) if file else None
    embedder = Embedder.load(MINILM)
    with workspace.lock():
        context = RoundContext(workspace, config, len(finished_rounds(workspace)), in_round=False)
        test = collect(context).test
    measured = 0
    if suite is not None:
        records = suite_records(context, scored_by, test)
    else:
        labelled_records = context.dataset(carried_dataset(workspace)).records if given is None else given
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
    taken = {id for table in measured.values() for id in table["input_id"].to_pylist()}
    return records.filter(pa.array([id not in taken for id in records["input_id"].to_pylist()], pa.bool_()))


def _labelled(records: pa.Table) -> list[LabelledPrompt]:
    """The records with an answer, each once."""
    rows = records.select(["id", "prompt", "text", "completion"]).to_pylist()
    asked = {row["id"]: (record_turns(row), row["completion"]) for row in rows if row["completion"] is not None}
    return [LabelledPrompt(id, prompt, answer) for id, (prompt, answer) in asked.items() if prompt]


def _judge(lm: LanguageModel, records: pa.Table, suite: SuiteConfig, name: str) -> Judge:
    """Answers and scores as the suite's scorer gives them; 1 is right."""
    rows = {row["id"]: row for row in records.to_pylist()}

    def judge(asked: Sequence[LabelledPrompt], prompts: Sequence[Turns]) -> JudgedAnswers:
        changed = [
            {**rows[record.id], "id": str(place), "prompt": prompt, "text": None}
            for place, (record, prompt) in enumerate(zip(asked, prompts, strict=True))
        ]
        result = run_suite(lm, pa.Table.from_pylist(changed, schema=RECORD), suite, name, full=True)
        scores = result.predictions["score"].to_pylist()
        return JudgedAnswers(result.predictions["predicted"].to_pylist(), [score >= 1 for score in scores])

    return judge
