"""Builds the score table: how uncertain the champion is about each record, and the record's embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.models.calibration import at_temperature
from posttrain.models.chat import naming_records
from posttrain.models.task import Turns
from posttrain.select.pool_sample import sample_pool, with_sample_sizes
from posttrain.select.scores import uncertainty
from posttrain.select.scores.answers import answer_group, surprisal
from posttrain.select.scores.calibration import answer_confidence
from posttrain.select.scores.context import ScoringBatch, ScoringContext
from posttrain.select.scores.labels import embedding_group, label_group, sentence_group
from posttrain.select.scores.passes import (
    ScoringInput,
    ScoringModel,
    prompts_of,
    record_location,
    to_list_column,
    to_matrix,
)
from posttrain.select.scores.registry import BASE_MEASURES, SCORES

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

Columns = dict[str, Any]
Embeddings = npt.NDArray[np.float32]


def score_schema(width: int, labels: int = 0, extra: Sequence[str] = ()) -> pa.Schema:
    """Returns the schema of a score table.

    Args:
        width: dimensions of the embeddings.
        labels: number of the task's labels.
        extra: names of scores (see `SCORES`), which come between the measures and the embedding.
    """
    return pa.schema(
        [
            pa.field("id", pa.string()),
            pa.field("entropy", pa.float64()),  # nats
            pa.field("least_confidence", pa.float64()),
            pa.field("margin", pa.float64()),  # NaN for free text
            pa.field("predicted", pa.string()),
            pa.field("runner_up", pa.string()),  # second most probable label; null for free text
            pa.field("confidence", pa.float64()),
            *(pa.field(name, pa.float64()) for name in extra),
            pa.field("embedding", pa.list_(pa.float32(), width)),
            *([pa.field("probabilities", pa.list_(pa.float32(), labels))] if labels else []),
        ]
    )


def score_pool(scoring: ScoringContext, pool: pa.Table, size: int, seed: int, names: Sequence[str] = ()) -> pa.Table:
    """Scores at most ``size`` records of the pool.

    With a closed label set the measures come from the labels' probabilities. For free text the model answers greedily
    and its answer y of T tokens is scored: ``entropy`` is -ln P(y | x) / T, the surprisal per token (a long answer is
    not uncertain for its length; A. Malinin and M. Gales, Uncertainty Estimation in Autoregressive Structured
    Prediction, ICLR 2021), ``confidence`` is exp of its negative over the temperature that calibration fitted,
    ``least_confidence`` is 1 - P(y | x) (B. Settles and M. Craven, EMNLP 2008), and ``margin`` is NaN.

    Args:
        scoring: the champion, the labels (none for free text) and the settings.
        pool: records by the record schema (``id``, ``prompt``, ``text``).
        size: size of the sample.
        seed: seed of the sample.
        names: further scores, a column each; those of labelled records do not count.

    Returns:
        Table by ``score_schema``, in the order of ``id``. Its schema's metadata holds ``sampled`` and
        ``pool``, the numbers of records scored and offered (see ``sample_sizes``).

    Raises:
        UserError: if a record has neither prompt nor text.
    """
    return with_sample_sizes(score_records(scoring, sample_pool(pool, size, seed), names), pool)


def score_records(scoring: ScoringContext, records: pa.Table, names: Sequence[str] = ()) -> pa.Table:
    """Scores records: a table by ``score_schema``, in their order.

    Args:
        scoring: the champion, the labels and the settings.
        records: RECORD table.
        names: further scores, as `score_pool` takes them.

    Raises:
        UserError: as `score_pool`.
    """
    prompts, names = prompts_of(records), _pool_scores(names)
    measure = _measure_labels if scoring.labels else _measure_answers
    with naming_records(prompts, lambda row: record_location(records, row)):
        columns, embeddings = measure(scoring, prompts)
        batch = ScoringBatch(scoring, prompts, columns["predicted"].to_pylist())
        columns |= {name: np.asarray(SCORES[name].compute(batch), np.float64) for name in names}
    return _score_table(records, columns, embeddings, scoring, names)


def unscored_table(scoring: ScoringContext, records: pa.Table, names: Sequence[str] = ()) -> pa.Table:
    """Embeds records without scoring them: as `score_records`, with measures NaN and answers null."""
    prompts, names = prompts_of(records), _pool_scores(names)
    # NaN, not 0: `score_columns` imputes missing values from the nearest scored records.
    missing = np.full(len(prompts), np.nan)
    columns: Columns = dict.fromkeys((*BASE_MEASURES, *names), missing)
    columns |= dict.fromkeys(("predicted", "runner_up"), [None] * len(prompts))
    if scoring.labels:
        columns["probabilities"] = to_list_column(np.full((len(prompts), len(scoring.labels)), np.nan))
    return _score_table(records, columns, _embed(scoring, prompts), scoring, names)


def score_labelled(scoring: ScoringContext, records: pa.Table, names: Sequence[str]) -> pa.Table:
    """Computes the scores that need the right answer, of the records that have one.

    Args:
        scoring: the models and their settings.
        records: RECORD table.
        names: scores of labelled records.

    Returns:
        ``id``, ``input_id`` and float64 columns by name, in the order of the records.
    """
    has_answer = pa.array([answer is not None for answer in records["completion"].to_pylist()], pa.bool_())
    labelled = records.filter(has_answer)
    prompts = prompts_of(labelled)
    batch = ScoringBatch(scoring, prompts, labelled["completion"].to_pylist())
    # In the registry's order, whatever the config's: the artifact's id follows from the order of its columns.
    ordered = [name for name in SCORES if name in names]
    with naming_records(prompts, lambda row: record_location(labelled, row)):
        columns = {name: np.asarray(SCORES[name].compute(batch), np.float64) for name in ordered}
    return pa.table({"id": labelled["id"], "input_id": labelled["input_id"], **columns})


def embed_records(lm: LanguageModel | ScoringContext, records: pa.Table) -> Embeddings:
    """Embeds the records' inputs, float32 [N, D], as `score_pool` does."""
    scoring = lm if isinstance(lm, ScoringContext) else ScoringContext(ScoringModel.from_language_model(lm))
    return _embed(scoring, prompts_of(records))


def _pool_scores(names: Sequence[str]) -> list[str]:
    return [name for name in names if SCORES[name].task != "labelled"]


def _embed(scoring: ScoringContext, prompts: Sequence[Turns]) -> Embeddings:
    group = embedding_group() if scoring.sentences is None else sentence_group()
    return to_matrix(scoring.run(group, _inputs(prompts), scoring.sentences), "embedding")


def _inputs(prompts: Sequence[Turns]) -> list[ScoringInput]:
    return [ScoringInput(prompt) for prompt in prompts]


def _measure_labels(scoring: ScoringContext, prompts: list[Turns]) -> tuple[Columns, Embeddings]:
    """Computes base columns and embeddings from the probabilities of a closed label set."""
    labels = scoring.labels
    table = scoring.run(label_group(labels), _inputs(prompts))
    logs = at_temperature(to_matrix(table, "log_probabilities"), scoring.temperature)
    probabilities = np.exp(logs)
    # Stable: of equally probable labels the first in the label set wins, on every machine.
    best = np.argsort(-probabilities, axis=1, kind="stable")
    names = np.array(labels, dtype=object)
    columns: Columns = {
        "entropy": uncertainty.entropy(probabilities),
        "least_confidence": uncertainty.least_confidence(probabilities),
        "margin": uncertainty.margin(probabilities),
        "predicted": pa.array(names[best[:, 0]], pa.string()),
        "runner_up": names[best[:, 1]] if len(labels) > 1 else [None] * len(prompts),
        "confidence": probabilities.max(axis=1),
        "probabilities": to_list_column(probabilities),
    }
    return columns, _embeddings(scoring, prompts, table)


def _measure_answers(scoring: ScoringContext, prompts: list[Turns]) -> tuple[Columns, Embeddings]:
    """Computes base columns and embeddings from greedy answers in free text."""
    table = scoring.run(answer_group(), _inputs(prompts))
    nats = surprisal(table)
    columns: Columns = {
        "entropy": nats,
        # 1 - exp(x) by expm1: near x = 0 the difference would lose all its digits.
        "least_confidence": -np.expm1(np.minimum(table["log_probability"].to_numpy(), 0.0)),
        "margin": np.full(len(prompts), np.nan),
        "predicted": table["predicted"],
        "runner_up": [None] * len(prompts),
        "confidence": answer_confidence(nats, scoring.temperature),
    }
    return columns, _embeddings(scoring, prompts, table)


def _embeddings(scoring: ScoringContext, prompts: list[Turns], table: pa.Table) -> Embeddings:
    """Returns the embeddings of the pass that scored the records, or of the sentence model in its own pass."""
    return to_matrix(table, "embedding") if scoring.sentences is None else _embed(scoring, prompts)


def _score_table(
    records: pa.Table,
    columns: Columns,
    embeddings: Embeddings,
    scoring: ScoringContext,
    names: Sequence[str],
) -> pa.Table:
    columns = {
        "id": records["id"].combine_chunks(),
        **columns,
        "embedding": to_list_column(embeddings),
    }
    return pa.table(columns, schema=score_schema(embeddings.shape[1], len(scoring.labels), names))
