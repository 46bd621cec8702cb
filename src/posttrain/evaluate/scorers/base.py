"""The inputs and outputs of a scorer: examples from records, scores of answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.metrics import ClassMetrics
from posttrain.models.task import TaskConfig, Turns, record_turns
from posttrain.store.errors import UserError

if TYPE_CHECKING:
    from posttrain.models.ensembles.ensemble import Ensemble
    from posttrain.models.generator import Answer
    from posttrain.models.language_model import LanguageModel

_COLUMNS = ("id", "prompt", "completion", "rejected", "text", "source", "line", "meta")


@dataclass(frozen=True)
class ScorerOutput:
    """Answers and scores of N records.

    Args:
        predicted: The model's answers.
        score: float64 [N]; its mean is the suite's paired metric, so higher is better.
        valid: bool [N]; False where the answer is outside the allowed set or was cut off.
        confidence: float64 [N], probability of the answer; NaN where it is not known.
        log_likelihood: float64 [N], ln P(expected | prompt) in nats; NaN where it is not known.
        tokens: int64 [N], tokens of the expected answer; zeros where they are not counted.
        labels: float32 [N, K], ln P(label | prompt) of the label set, normalised over it; None where not computed.
        metrics: Metrics of the scorer's own, by name.
        per_class: Counts by label, of answers with several parts.
        ensemble: `Ensemble.describe`, of an ensemble.
    """

    predicted: Sequence[str]
    score: np.ndarray
    valid: np.ndarray
    confidence: np.ndarray
    log_likelihood: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_class: Sequence[ClassMetrics] = ()
    ensemble: dict[str, Any] | None = None


@dataclass(frozen=True)
class Examples:
    """N records.

    Args:
        ids: Record ids.
        prompts: Turns before the answer; empty for a plain text.
        expected: The right answer, of a preference pair the better one; None where the record has none.
        meta: The record's other columns, as JSON text.
        locations: ``file:line`` of each record, for messages.
        rejected: The worse answer of a preference pair; None for other records.
    """

    ids: list[str]
    prompts: list[Turns]
    expected: list[str | None]
    meta: list[str | None]
    locations: list[str]
    rejected: list[str | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def check_prompts(self, where: str) -> None:
        """Raises a UserError that names the first record without a prompt."""
        for prompt, location in zip(self.prompts, self.locations, strict=True):
            if not prompt:
                raise UserError(f"{location} has no prompt to answer", where=where)

    def answers(self, where: str) -> list[str]:
        """Returns the expected answers.

        Raises:
            UserError: a record has none; names the first.
        """
        answers: list[str] = []
        for answer, location in zip(self.expected, self.locations, strict=True):
            if answer is None:
                raise UserError(f"{location} has no answer to compare with", where=where, fix="add the right answer")
            answers.append(answer)
        return answers


@dataclass(frozen=True)
class Scorer:
    """A scorer of answers, with the names of its metrics.

    Args:
        score: ``score(lm, examples, suite, where) -> ScorerOutput``.
        main: The metric that stands for the suite.
        paired: The metric that is the mean of the records' scores, for which intervals are computed.
        metrics: Names of all metrics without a label set. The suite computes ``paired``, ``invalid_rate``,
            ``log_likelihood_sum`` with ``log_likelihood``, from that sum ``perplexity`` with ``tokens``, ``ece`` and,
            with a label set, ``macro_f1``; any other must be in `ScorerOutput.metrics`.
        label_metrics: Names of further metrics with a label set.
        plain_text: True if records without a prompt can be scored.
        needs_labels: True if the task must have a closed label set.
        ensembles: True if ``score`` takes an `Ensemble` too, and so asks for answers by `write_answers` alone.
    """

    score: Callable[[LanguageModel, Examples, SuiteConfig, str], ScorerOutput]
    main: str
    paired: str
    metrics: frozenset[str]
    label_metrics: frozenset[str] = field(default=frozenset())
    plain_text: bool = False
    needs_labels: bool = False
    ensembles: bool = False


@dataclass(frozen=True)
class GivenAnswers:
    """Answers to N records that are there already, in the place of a model that a scorer would ask.

    Args:
        task: The task.
        answers: [N].
    """

    task: TaskConfig
    answers: Sequence[Answer]

    def generate(self, prompts: Sequence[Turns]) -> list[Answer]:
        """Returns the answers."""
        return list(self.answers)


def write_answers(model: LanguageModel | Ensemble | GivenAnswers, prompts: Sequence[Turns]) -> list[Answer]:
    """Has a model or an ensemble answer every prompt."""
    from posttrain.models.generator import greedy_answers
    from posttrain.models.language_model import LanguageModel

    return greedy_answers(model, prompts) if isinstance(model, LanguageModel) else model.generate(prompts)


def from_generations(
    answers: Sequence[Answer],
    score: Sequence[float],
    valid: Sequence[bool],
    metrics: Mapping[str, float] | None = None,
) -> ScorerOutput:
    """Returns the scores of written answers, whose probabilities are not known."""
    unknown = np.full(len(answers), np.nan)
    return ScorerOutput(
        predicted=[answer.text for answer in answers],
        score=np.asarray(score, np.float64),
        valid=np.asarray(valid, bool),
        confidence=unknown,
        log_likelihood=unknown.copy(),
        tokens=np.zeros(len(answers), np.int64),
        metrics=metrics or {},
    )


def read_examples(records: pa.Table, where: str) -> Examples:
    """Reads the records of a suite.

    A plain text is scored as a whole: it has no prompt and is itself the expected answer.

    Args:
        records: Table by the record schema; ``source``, ``line`` and ``meta`` may be missing.
        where: The suite's config key, named in errors.

    Raises:
        UserError: if there are no records.
    """
    if records.num_rows == 0:
        raise UserError("the suite has no records", where=where, fix="check its `data`")
    names = set(records.column_names)
    examples = Examples([], [], [], [], [])
    for row in records.select([name for name in _COLUMNS if name in names]).to_pylist():
        examples.ids.append(row["id"])
        examples.prompts.append([] if _is_plain_text(row) else record_turns({"text": None, **row}))
        examples.expected.append(row.get("text") if _is_plain_text(row) else row["completion"])
        examples.rejected.append(row.get("rejected"))
        examples.meta.append(row.get("meta"))
        examples.locations.append(_location(row))
    return examples


def sample_records(records: pa.Table, n: int | None) -> pa.Table:
    """Draws a fixed sample: the ``n`` records with the smallest hash of their id, in input order."""
    if n is None or records.num_rows <= n:
        return records
    # By hash and not by seed: every round draws the same records, whatever their order, so that rounds can be compared.
    digests = [hashlib.sha256(id.encode()).digest() for id in records["id"].to_pylist()]
    rows = sorted(sorted(range(len(digests)), key=lambda row: (digests[row], row))[:n])
    return records.take(pa.array(rows))


def _is_plain_text(row: dict[str, Any]) -> bool:
    return not row.get("prompt") and row["completion"] is None and row.get("text") is not None


def _location(row: dict[str, Any]) -> str:
    if row.get("source") and row.get("line"):
        return f"{row['source']}:{row['line']}"
    return f"record {row['id']}"
