"""Score the pool: how unsure the champion is of each record, and where the record lies."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from posttrain.models.request import request
from posttrain.models.task import Turns
from posttrain.select import uncertainty
from posttrain.select.config import SelectConfig
from posttrain.store.errors import UserError

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


def score_schema(width: int, labels: int = 0) -> pa.Schema:
    """Schema of a score table whose embeddings have ``width`` dimensions, and of a task with so many labels."""
    return pa.schema(
        [
            pa.field("id", pa.string()),
            pa.field("source", pa.string()),  # the file that the record is of
            pa.field("cost", pa.float64()),  # characters of the input, which somebody has to read
            pa.field("entropy", pa.float64()),  # nats
            pa.field("least_confidence", pa.float64()),
            pa.field("margin", pa.float64()),  # NaN for free text
            pa.field("predicted", pa.string()),
            pa.field("runner_up", pa.string()),  # second most probable label; null for free text
            pa.field("confidence", pa.float64()),
            pa.field("embedding", pa.list_(pa.float32(), width)),
            *([pa.field("probabilities", pa.list_(pa.float32(), labels))] if labels else []),
        ]
    )


def score_pool(
    lm: LanguageModel,
    pool: pa.Table,
    labels: Sequence[str] | None,
    config: SelectConfig,
    seed: int,
    *,
    cold: bool = False,
) -> pa.Table:
    """Score at most ``config.pool_sample`` records of the pool.

    With a closed label set the measures come from the labels' probabilities. For free text the model
    answers greedily and its answer y of T tokens is scored: ``entropy`` is -ln P(y | x) / T, the surprisal
    per token (a long answer is not uncertain for its length; A. Malinin and M. Gales, Uncertainty
    Estimation in Autoregressive Structured Prediction, ICLR 2021), ``confidence`` is exp of its negative,
    ``least_confidence`` is 1 - P(y | x) (B. Settles and M. Craven, EMNLP 2008), and ``margin`` is NaN.

    Args:
        lm: the champion.
        pool: records by the record schema (``id``, ``source``, ``prompt``, ``text``).
        labels: the closed label set; None or empty for free text.
        config: the config section ``select``.
        seed: of the sample.
        cold: the model does not know the task yet: only embed, leave the measures NaN and the answers null.

    Returns:
        Table by ``score_schema``, in the order of ``id``. Its schema's metadata holds ``sampled`` and
        ``pool``, the numbers of records scored and offered (see ``sample_note``).

    Raises:
        UserError: if a record has neither prompt nor text.
    """
    sample = sample_pool(pool, config.pool_sample, seed)
    prompts = _prompts(sample)
    if cold:
        columns, embeddings = _unscored(lm, prompts, len(labels or ()))
    elif labels:
        columns, embeddings = _closed(lm, prompts, labels)
    else:
        columns, embeddings = _free_text(lm, prompts)
    columns = {
        "id": sample["id"].combine_chunks(),
        "source": sample["source"].combine_chunks(),
        "cost": [float(max(1, sum(len(turn["content"]) for turn in prompt))) for prompt in prompts],
        **columns,
        "embedding": _lists(embeddings),
    }
    counts = {"sampled": str(sample.num_rows), "pool": str(pool.num_rows)}
    return pa.table(columns, schema=score_schema(embeddings.shape[1], len(labels or ())).with_metadata(counts))


def embed_records(lm: LanguageModel, records: pa.Table) -> np.ndarray:
    """Embeddings of the records' inputs, float32 [N, D], as `score_pool` gives them."""
    from posttrain.models.likelihood import embeddings

    return embeddings(lm, _prompts(records), progress="embedding")


def sample_pool(pool: pa.Table, n: int, seed: int) -> pa.Table:
    """At most ``n`` records, those with the smallest hash of seed and id; sorted by id.

    Whether a record is drawn depends on the ids alone, not on the order of the rows.
    """
    ids = pool["id"].to_pylist()
    if len(ids) > n:
        ids = sorted(ids, key=lambda id: hashlib.sha256(f"{seed}:{id}".encode()).digest())[:n]
    drawn = set(ids)
    return pool.filter(pa.array([id in drawn for id in pool["id"].to_pylist()], pa.bool_())).sort_by("id")


def sample_note(scores: pa.Table) -> dict[str, int]:
    """How many records were scored and how many the pool had: ``{"sampled": n, "pool": N}``."""
    return {name.decode(): int(count) for name, count in (scores.schema.metadata or {}).items()}


def _prompts(pool: pa.Table) -> list[Turns]:
    prompts: list[Turns] = []
    for row in pool.select(["id", "prompt", "text"]).to_pylist():
        prompt = request(row)
        if not prompt:
            raise UserError("has neither a prompt nor a text", where=f"pool record {row['id']}")
        prompts.append(prompt)
    return prompts


def _lists(rows: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel(), pa.float32()), rows.shape[1])


def _unscored(lm: LanguageModel, prompts: list[Turns], labels: int) -> tuple[dict[str, object], np.ndarray]:
    from posttrain.models.likelihood import embeddings

    unknown = np.full(len(prompts), np.nan)
    columns: dict[str, object] = dict.fromkeys(("entropy", "least_confidence", "margin", "confidence"), unknown)
    columns |= dict.fromkeys(("predicted", "runner_up"), [None] * len(prompts))
    if labels:
        columns["probabilities"] = _lists(np.full((len(prompts), labels), np.nan))
    return columns, embeddings(lm, prompts, progress="embedding the pool")


def _closed(lm: LanguageModel, prompts: list[Turns], labels: Sequence[str]) -> tuple[dict[str, object], np.ndarray]:
    from posttrain.models.likelihood import label_scores

    scores = label_scores(lm, prompts, labels, embeddings=True, progress="scoring the pool")
    probabilities = np.exp(scores.log_probabilities.astype(np.float64))
    best = np.argsort(-probabilities, axis=1, kind="stable")
    names = np.array(labels, dtype=object)
    columns: dict[str, object] = {
        "entropy": uncertainty.entropy(probabilities),
        "least_confidence": uncertainty.least_confidence(probabilities),
        "margin": uncertainty.margin(probabilities),
        "predicted": names[best[:, 0]],
        "runner_up": names[best[:, 1]] if len(labels) > 1 else [None] * len(prompts),
        "confidence": probabilities.max(axis=1),
        "probabilities": _lists(probabilities),
    }
    assert scores.embeddings is not None
    return columns, scores.embeddings


def _free_text(lm: LanguageModel, prompts: list[Turns]) -> tuple[dict[str, object], np.ndarray]:
    from posttrain.models.generate import generate
    from posttrain.models.likelihood import answer_log_likelihoods, embeddings

    answers = [answer.text for answer in generate(lm, prompts)]
    sums, counts = answer_log_likelihoods(lm, prompts, answers)
    surprisal = np.abs(-sums / np.maximum(counts, 1))
    columns: dict[str, object] = {
        "entropy": surprisal,
        "least_confidence": -np.expm1(np.minimum(sums, 0.0)),
        "margin": np.full(len(prompts), np.nan),
        "predicted": answers,
        "runner_up": [None] * len(prompts),
        "confidence": np.exp(-surprisal),
    }
    return columns, embeddings(lm, prompts, progress="embedding the pool")
