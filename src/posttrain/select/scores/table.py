"""Builds the score table: how uncertain the champion is about each record, and the record's embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.models.task import Turns
from posttrain.select.config import SelectConfig
from posttrain.select.pool_sample import sample_pool, with_sample_sizes
from posttrain.select.scores import uncertainty
from posttrain.select.scores.answers import answer_group, surprisal
from posttrain.select.scores.calibration import answer_confidence, at_temperature
from posttrain.select.scores.context import ScoringContext, labelled_columns, pool_columns
from posttrain.select.scores.labels import label_group
from posttrain.select.scores.passes import ScoringInput, ScoringModel, prompts_of, to_list_column, to_matrix
from posttrain.select.scores.registry import BASE_MEASURES, SCORES

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

Columns = dict[str, Any]


def score_schema(width: int, labels: int = 0, extra: Sequence[str] = ()) -> pa.Schema:
    """Schema of a score table.

    Args:
        width: dimensions of the embeddings.
        labels: how many the task has.
        extra: names of scores (see `SCORES`) that stand between the measures and the embedding.
    """
    return pa.schema(
        [
            pa.field("id", pa.string()),
            pa.field("source", pa.string()),  # the file that the record is of
            pa.field("cost", pa.float64()),  # in letters of the input, which somebody has to read, or as the data says
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


def score_pool(
    lm: LanguageModel | ScoringContext,
    pool: pa.Table,
    labels: Sequence[str] | None,
    config: SelectConfig,
    seed: int,
) -> pa.Table:
    """Ask the champion about at most ``config.pool_sample`` records of the pool.

    With a closed label set the measures come from the labels' probabilities. For free text the model
    answers greedily and its answer y of T tokens is scored: ``entropy`` is -ln P(y | x) / T, the surprisal
    per token (a long answer is not uncertain for its length; A. Malinin and M. Gales, Uncertainty
    Estimation in Autoregressive Structured Prediction, ICLR 2021), ``confidence`` is exp of its negative over the
    temperature that calibration found, ``least_confidence`` is 1 - P(y | x) (B. Settles and M. Craven,
    EMNLP 2008), and ``margin`` is NaN.
    The scores that the config names come on top, a column each.

    Args:
        lm: the champion, or all that a pass with a cache and further scores takes.
        pool: records by the record schema (``id``, ``source``, ``prompt``, ``text``).
        labels: the closed label set; None or empty for free text.
        config: the config section ``select``.
        seed: of the sample.

    Returns:
        Table by ``score_schema``, in the order of ``id``. Its schema's metadata holds ``sampled`` and
        ``pool``, the numbers of records scored and offered (see ``sample_sizes``).

    Raises:
        UserError: if a record has neither prompt nor text.
    """
    scoring = lm if isinstance(lm, ScoringContext) else ScoringContext(ScoringModel.of(lm), config=config.scoring)
    scoring = replace(scoring, labels=labels or ())
    return with_sample_sizes(score_records(scoring, sample_pool(pool, config.pool_sample, seed), config), pool)


def score_records(scoring: ScoringContext, records: pa.Table, config: SelectConfig) -> pa.Table:
    """What the champion says of records: a table by ``score_schema``, in their order.

    Args:
        scoring: who is asked, and what.
        records: RECORD table.
        config: the config section ``select``, which may name further scores.

    Raises:
        UserError: as `score_pool`.
    """
    prompts, names = prompts_of(records), _score_names(config)
    columns, embeddings, base = _base_columns(scoring, prompts)
    columns |= pool_columns(names, scoring, prompts, base)
    return _score_table(records, prompts, columns, embeddings, scoring, names)


def unscored_table(scoring: ScoringContext, records: pa.Table, config: SelectConfig) -> pa.Table:
    """Where records lie, of which the champion is asked nothing: as `score_records`, measures NaN and answers null."""
    prompts, names = prompts_of(records), _score_names(config)
    unknown = np.full(len(prompts), np.nan)
    columns: Columns = dict.fromkeys((*BASE_MEASURES, *names), unknown)
    columns |= dict.fromkeys(("predicted", "runner_up"), [None] * len(prompts))
    if scoring.labels:
        columns["probabilities"] = to_list_column(np.full((len(prompts), len(scoring.labels)), np.nan))
    return _score_table(records, prompts, columns, scoring.embeddings(_scoring_inputs(prompts)), scoring, names)


def _score_names(config: SelectConfig) -> list[str]:
    return [name for name in config.wanted_scores() if SCORES[name].of != "labelled"]


def _score_table(
    records: pa.Table,
    prompts: list[Turns],
    columns: Columns,
    embeddings: npt.NDArray[np.float32],
    scoring: ScoringContext,
    names: Sequence[str],
) -> pa.Table:
    columns = {
        "id": records["id"].combine_chunks(),
        "source": records["source"].combine_chunks(),
        "cost": [float(max(1, sum(len(turn["content"]) for turn in prompt))) for prompt in prompts],
        **columns,
        "embedding": to_list_column(embeddings),
    }
    return pa.table(columns, schema=score_schema(embeddings.shape[1], len(scoring.labels), names))


def score_labelled(scoring: ScoringContext, records: pa.Table, names: Sequence[str]) -> pa.Table:
    """The scores that need the right answer, of the records that have one.

    Args:
        scoring: who scores, and how.
        records: RECORD table.
        names: scores of labelled records.

    Returns:
        ``id``, ``input_id`` and float64 columns by name, in the order of the records.
    """
    labelled = records.filter(pa.array([one is not None for one in records["completion"].to_pylist()], pa.bool_()))
    columns = labelled_columns(names, scoring, prompts_of(labelled), labelled["completion"].to_pylist())
    return pa.table({"id": labelled["id"], "input_id": labelled["input_id"], **columns})


def embed_records(lm: LanguageModel | ScoringContext, records: pa.Table) -> npt.NDArray[np.float32]:
    """Embeddings of the records' inputs, float32 [N, D], as `score_pool` gives them."""
    scoring = lm if isinstance(lm, ScoringContext) else ScoringContext(ScoringModel.of(lm))
    return scoring.embeddings(_scoring_inputs(prompts_of(records)))


def _scoring_inputs(prompts: Sequence[Turns]) -> list[ScoringInput]:
    return [ScoringInput(prompt) for prompt in prompts]


def _base_columns(scoring: ScoringContext, prompts: list[Turns]) -> tuple[Columns, npt.NDArray[np.float32], pa.Table]:
    return _label_columns(scoring, prompts) if scoring.labels else _text_columns(scoring, prompts)


def _label_columns(scoring: ScoringContext, prompts: list[Turns]) -> tuple[Columns, npt.NDArray[np.float32], pa.Table]:
    labels = scoring.labels
    table = scoring.run(label_group(labels), _scoring_inputs(prompts))
    logs = at_temperature(to_matrix(table, "log_probabilities"), scoring.temperature)
    probabilities = np.exp(logs)
    best = np.argsort(-probabilities, axis=1, kind="stable")
    names = np.array(labels, dtype=object)
    columns: Columns = {
        "entropy": uncertainty.entropy(probabilities),
        "least_confidence": uncertainty.least_confidence(probabilities),
        "margin": uncertainty.margin(probabilities),
        "predicted": names[best[:, 0]],
        "runner_up": names[best[:, 1]] if len(labels) > 1 else [None] * len(prompts),
        "confidence": probabilities.max(axis=1),
        "probabilities": to_list_column(probabilities),
    }
    base = pa.table({"predicted": pa.array(names[best[:, 0]], pa.string())})
    return columns, _embeddings(scoring, prompts, table), base


def _text_columns(scoring: ScoringContext, prompts: list[Turns]) -> tuple[Columns, npt.NDArray[np.float32], pa.Table]:
    table = scoring.run(answer_group(), _scoring_inputs(prompts))
    nats = surprisal(table)
    columns: Columns = {
        "entropy": nats,
        "least_confidence": -np.expm1(np.minimum(table["log_probability"].to_numpy(), 0.0)),
        "margin": np.full(len(prompts), np.nan),
        "predicted": table["predicted"],
        "runner_up": [None] * len(prompts),
        "confidence": answer_confidence(nats, scoring.temperature),
    }
    return columns, _embeddings(scoring, prompts, table), table


def _embeddings(scoring: ScoringContext, prompts: list[Turns], table: pa.Table) -> npt.NDArray[np.float32]:
    """The champion's came with its answers; a sentence model has to be asked."""
    return to_matrix(table, "embedding") if scoring.sentences is None else scoring.embeddings(_scoring_inputs(prompts))
