"""Score: scores the pool by the champion's uncertainty, and embeds pool, labelled and hard test records."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.records.record import concat
from posttrain.evaluate.suite import read_evaluation
from posttrain.label.queue import Queue
from posttrain.loop.batch_counts import STAGE as COUNTS
from posttrain.loop.context import RoundContext, model_key
from posttrain.loop.difficulty import follows_scores
from posttrain.loop.gain import STAGE as GAIN
from posttrain.loop.history import finished_states, parent_dataset
from posttrain.loop.record import RoundRecord, StageReport
from posttrain.loop.score_files import (
    CASES,
    HARD_CASES,
    HARD_RECORDS,
    LABELLED,
    LABELLED_SCORES,
    SCORES,
    UNSCORED,
    cases_to_rows,
    load_array,
)
from posttrain.loop.scoring import fit_calibration, remove_unused_scores, scoring_for
from posttrain.loop.stage import Stage
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.state import RoundState
from posttrain.report.section import Text
from posttrain.select.hard_cases import (
    HIGH_LOSS_PERCENTILE,
    MAX_HARD_CASES,
    POOL_KINDS,
    TRAINING_KIND,
    Evaluations,
    HardCase,
    above_percentile,
    hard_cases,
)
from posttrain.select.hard_negatives import boundary_records, confused_labels
from posttrain.select.pool_sample import sample_pool, sample_sizes, with_sample_sizes
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import to_matrix
from posttrain.select.scores.registry import SCORES as SCORE_NAMES
from posttrain.select.scores.table import embed_records, score_labelled, score_pool, unscored_table
from posttrain.select.strategy import MAX_AGREEMENT_RECORDS, depends_on_neighbours, neighbour_agreement
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.message import Message

log = logging.getLogger("posttrain")


def free_records(context: RoundContext, pool: pa.Table, train: pa.Table) -> pa.Table:
    """Returns the pool's records that people did not drop, and whose inputs the training set does not hold yet."""
    inputs = pa.array(train["input_id"].to_pylist(), pa.string())
    taken = compute.is_in(pool["input_id"], value_set=inputs)
    dropped = compute.is_in(pool["id"], value_set=pa.array(dropped_records(context), pa.string()))
    return pool.filter(compute.invert(compute.or_(taken, dropped)))


def dropped_records(context: RoundContext) -> list[str]:
    """Returns the ids of the records that people dropped so far: they would drop them again."""
    return Queue(context.workspace.metadata).dropped_records(context.number)


@dataclass(frozen=True)
class Score(Stage):
    """Scores pool records by the champion's uncertainty; embeds them, labelled records and hard test records.

    Args:
        champion: Id of the model.
        pool: Id of the pool.
        train: Id of the training set so far, whose inputs are not scored.
        test: Id of the test set.
        evaluation: Id of the champion's evaluation.
        cold: True to embed only, because the champion is untrained and its probabilities say nothing.
        others: Evaluations that hard cases compare the champion's with, by role.
        scoring: The champion, and the model that embeds records.
    """

    champion: str
    pool: str
    train: str
    test: str
    evaluation: str
    cold: bool
    others: dict[str, str]
    scoring: ScoringContext
    name = "score"
    title = Message("score")
    kind = "scores"
    version = 7

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Scores the pool, unless a batch is out already."""
        state = context.state
        champion, pool, test = state.id("champion"), state.id("pool"), state.id("test")
        # A batch that people are labelling stays, whatever happens to the pool and the config meanwhile.
        labels = context.workspace.metadata.artifact(state.labelled or "")
        # Not one of which every record was skipped: the round would wait for ever.
        skipped = labels is not None and not labels.meta["labels"]
        if state.waits_for is not None and state.batch and not skipped and _are_whole(context, *state.batch.values()):
            return state
        # The loop that draws at random needs no scores from its champion, unless training follows them.
        needs_scores = not context.workspace.metadata.arm or follows_scores(context.config)
        cold = champion == finished_states(context.workspace)[0].candidate or not needs_scores
        evaluation = context.run(Evaluate(champion, test))
        train = parent_dataset(context.workspace)
        scores = context.run(cls.from_context(context, champion, pool, train, test, evaluation.id, cold))
        embedded_only = f", embedded {scores.meta['unscored']} more" if scores.meta["unscored"] else ""
        verb = "embedded" if cold else "scored"
        log.info("  %s %d of %d pool records%s", verb, scores.meta["sampled"], scores.meta["pool"], embedded_only)
        # The fields of the last attempt's batch go with its scores: none must describe the batch that is selected now.
        fresh = dict.fromkeys(("selection", "waits_for", "labelled"))
        return context.update(queried_pool=pool, scores=scores.id, **fresh).without(GAIN, COUNTS)

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports a pool of which only a sample was scored."""
        scores = record.artifact(record.state.scores)
        if scores is None or scores.meta["sampled"] >= scores.meta["pool"]:
            return StageReport()
        template = "scored a sample of {sampled} of the pool's {pool} free records"
        if scores.meta["cold"]:
            template = "embedded a sample of {sampled} of the pool's {pool} free records"
        sentence = Message(template, **scores.meta)
        if scores.meta["unscored"]:
            sentence = Message("{scored}, embedded {unscored} more", scored=sentence, unscored=scores.meta["unscored"])
        return StageReport(blocks=[Text(sentence, "sentence")])

    @classmethod
    def from_context(
        cls, context: RoundContext, champion: str, pool: str, train: str, test: str, evaluation: str, cold: bool
    ) -> "Score":
        """Builds the stage with the evaluations and models that it needs."""
        # Hard cases compare answers, and an untrained champion's are no better than chance.
        others = {} if cold else evaluations_to_compare(context, champion, test)
        return cls(champion, pool, train, test, evaluation, cold, others, scoring_for(context, champion))

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the models, the records and the evaluations that scores depend on."""
        inputs = {"champion": self.champion, "pool": self.pool, "train": self.train, "evaluation": self.evaluation}
        inputs |= self.others
        inputs |= {"sentence model": self.scoring.sentences.id} if self.scoring.sentences else {}
        return inputs | ({"test": self.test} if self._by_neighbours(context) or not self.cold else {})

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the numbers of records to score and embed, the scores and the task."""
        select = context.config.select
        settings: dict[str, Any] = {
            "pool_sample": select.pool_sample,
            "embedded": select.embedding_limit(self.cold),
            "by_neighbours": self._by_neighbours(context),
            "cold": self.cold,
            "dropped": dropped_records(context),
        }
        # Embeddings depend on no scores: a change of these redoes no cold start.
        settings |= {} if self.cold else {"hard_cases": select.hard_cases, "scores": select.wanted_scores()}
        return settings | model_key(context)

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the score tables, the embeddings of labelled records and the hard test cases."""
        select, scoring = context.config.select, self.scoring
        labelled, test = context.dataset(self.train).records, context.dataset(self.test).records
        free = free_records(context, context.dataset(self.pool).records, labelled)
        if context.in_round:  # a preview with another config must not remove the loop's cached scores
            remove_unused_scores(context, scoring)
        calibration = {} if self.cold else fit_calibration(context, scoring, test, self.evaluation)
        scaled = replace(scoring, temperature=calibration.get("temperature", 1.0))
        sample, seed = 0 if self.cold else select.pool_sample, context.seed("score")
        scored = None if self.cold else score_pool(scaled, free, sample, seed, self._score_names(context))
        agreement: dict[str, Any] = {}
        if self._by_neighbours(context):
            if scored is None:
                embeddings = embed_records(scoring, sample_pool(free, select.pool_sample, seed))
            else:
                embeddings = to_matrix(scored, "embedding")
            agreement = _neighbours(context, scoring, test, embeddings)
        embedded = select.embedding_limit(self.cold, agreement.get("neighbours_share", True))
        # Drawn from the same order, after the sample: no record is embedded twice.
        embedded_only = sample_pool(free, embedded - sample, seed, after=sample)
        # Every configured score has a column in a cold start too, so that tables of all rounds have one schema.
        names = select.wanted_scores()
        unscored = unscored_table(scaled, embedded_only, names) if scored is None or embedded_only.num_rows else None
        scores = with_sample_sizes(unscored, free) if scored is None else scored
        if unscored is not None and not self.cold:
            parquet.write_table(unscored, out / UNSCORED)
        parquet.write_table(scores, out / SCORES)
        if labelled.num_rows:
            np.save(out / LABELLED, embed_records(scoring, labelled), allow_pickle=False)
            names = [name for name in self._score_names(context) if SCORE_NAMES[name].task == "labelled"]
            if names:
                parquet.write_table(score_labelled(scoring, labelled, names), out / LABELLED_SCORES)
        if not self.cold:
            cases, hard = hard_test_cases(context, self.evaluation, self.others, test)
            if TRAINING_KIND in select.hard_cases:
                training_cases, rows = hard_training_cases(scoring, labelled)
                cases, hard = cases + training_cases, concat([hard, labelled.take(rows)])
            if set(POOL_KINDS) & set(select.hard_cases):
                embedded = scores if unscored is None else pa.concat_tables([scores, unscored])
                records = self._hard_records(context, embedded, labelled, load_array(out / LABELLED))
                (out / HARD_RECORDS).write_text(json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8")
            (out / CASES).write_text(json.dumps(cases_to_rows(cases), ensure_ascii=False, indent=1), encoding="utf-8")
            np.save(out / HARD_CASES, embed_records(scoring, hard), allow_pickle=False)
        unscored_count = 0 if self.cold else embedded_only.num_rows
        return {**sample_sizes(scores), "unscored": unscored_count, "cold": self.cold, **calibration, **agreement}

    def _hard_records(
        self, context: RoundContext, pool: pa.Table, labelled: pa.Table, embeddings: np.ndarray | None
    ) -> dict[str, str]:
        """Returns the pool records that are hard themselves, by id with the reason.

        Args:
            context: The round.
            pool: Score table of all embedded records.
            labelled: RECORD table.
            embeddings: Those of the labelled records; None without any.
        """
        select, ids = context.config.select, pool["id"].to_pylist()
        reasons: dict[str, list[str]] = {}
        if "high_entropy" in select.hard_cases:
            entropy = pool["entropy"].to_numpy(zero_copy_only=False)
            for row in above_percentile(entropy, HIGH_LOSS_PERCENTILE)[:MAX_HARD_CASES].tolist():
                reasons[ids[row]] = [f"entropy above the pool's {HIGH_LOSS_PERCENTILE:g}th percentile"]
        if "boundary" in select.hard_cases and embeddings is not None:
            main = next(iter(read_evaluation(context.path(self.evaluation)).values()))
            confusions = confused_labels(main.predictions, context.config.task.label_set)
            if not confusions:
                log.info("  no test error confuses two labels: no pool record is between them")
            answers = labelled["completion"].to_pylist()
            for record in boundary_records(to_matrix(pool, "embedding"), embeddings, answers, confusions):
                first, second = record.labels
                reason = f"between `{first}` and `{second}`, which the champion confuses"
                reasons.setdefault(ids[record.row], []).append(reason)
        return {id: "; ".join(sentences) for id, sentences in reasons.items()}

    def _score_names(self, context: RoundContext) -> list[str]:
        return [] if self.cold else context.config.select.wanted_scores()

    def _by_neighbours(self, context: RoundContext) -> bool:
        """Returns True if the strategy depends on whether neighbours share labels."""
        config = context.config
        return bool(config.task.label_set) and depends_on_neighbours(config.select.strategy, self.cold)


def _are_whole(context: RoundContext, *ids: str) -> bool:
    """Returns True if the files of these artifacts match their checksums."""
    try:
        for id in ids:
            context.path(id)
    except DamagedArtifactError as error:
        log.warning("%s; choosing the batch again", error)
        return False
    return True


def _neighbours(context: RoundContext, scoring: ScoringContext, test: pa.Table, pool: np.ndarray) -> dict[str, Any]:
    """Measures if test records that lie near each other share labels: only then is covering the pool worth it."""
    # The config's seed, not the round's: the same records in all rounds, so that a sentence model embeds them once.
    sample = sample_pool(test, MAX_AGREEMENT_RECORDS, context.config.seed)
    agreement = neighbour_agreement(embed_records(scoring, sample), sample["completion"].to_pylist(), pool)
    kappa = agreement.kappa if agreement.records else None
    return {"neighbours_share": agreement.neighbours_share_labels, "neighbours_kappa": kappa}


def evaluations_to_compare(context: RoundContext, champion: str, test: str) -> dict[str, str]:
    """Evaluates the models that the kinds of hard cases compare the champion with; returns the evaluations by role.

    ``previous`` is the champion that this one replaced, for regressions; ``other`` the model that it was last compared
    with, refused candidates too, for disagreement.
    """
    kinds = context.config.select.hard_cases
    # From rounds that are done alone, so that a killed round finds the same models again.
    models: dict[str, str] = {}
    for state in finished_states(context.workspace):
        if champion == state.candidate and state.champion not in (None, champion):
            models["previous"] = models["other"] = str(state.champion)
        elif champion == state.champion and state.candidate not in (None, champion):
            models["other"] = str(state.candidate)
    is_used = {"previous": "regressions" in kinds, "other": "disagreement" in kinds}
    return {role: context.run(Evaluate(model, test)).id for role, model in models.items() if is_used[role]}


def hard_test_cases(
    context: RoundContext, evaluation: str, others: dict[str, str], records: pa.Table
) -> tuple[list[HardCase], pa.Table]:
    """Finds the hard cases of the first suite; returns them and their records, in one order.

    Args:
        context: The round.
        evaluation: Id of the champion's evaluation.
        others: Result of `evaluations_to_compare`.
        records: RECORD table of the test set.
    """
    main = next(iter(read_evaluation(context.path(evaluation)).values()))
    predictions = {role: read_evaluation(context.path(id))[main.name].predictions for role, id in others.items()}
    ranked = hard_cases(context.config.select.hard_cases, Evaluations(main.predictions, **predictions))
    row_of = {id: row for row, id in enumerate(records["id"].to_pylist())}
    # The first suite may measure on a file of its own, whose records the test set does not hold.
    cases = [case for case in ranked if case.id in row_of]
    return cases, records.take(pa.array([row_of[case.id] for case in cases], pa.int64()))


def hard_training_cases(scoring: ScoringContext, labelled: pa.Table) -> tuple[list[HardCase], list[int]]:
    """Finds the training records whose loss is above the percentile; returns them and their rows, hardest first."""
    scores = score_labelled(scoring, labelled, ["loss"])
    row_of = {id: row for row, id in enumerate(labelled["id"].to_pylist())}
    high = above_percentile(scores["loss"].to_numpy(), HIGH_LOSS_PERCENTILE)[:MAX_HARD_CASES]
    rows = [row_of[id] for id in scores["id"].take(pa.array(high)).to_pylist()]
    answers = labelled["completion"].take(pa.array(rows, pa.int64())).to_pylist()
    ids = labelled["id"].take(pa.array(rows, pa.int64())).to_pylist()
    return [HardCase(id, (TRAINING_KIND,), answer, None) for id, answer in zip(ids, answers, strict=True)], rows
