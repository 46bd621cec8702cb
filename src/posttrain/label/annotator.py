"""The annotator interface, and a summary of the labels that an annotator returns."""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from posttrain.label.queue_rows import check_confidence
from posttrain.models.answer_form import AnswerForm

RecordReader = Callable[[Path, Mapping[str, str] | None], Iterable[pa.Table]]
"""Reads a file of records with its column mapping, as ``posttrain.data.reading.reader.read`` does."""

LEFT = "left"
"""The reason of records without a label that are given back to the pool, as the round went on without them."""


@dataclass(frozen=True)
class AnnotationRequest:
    """The context of a batch that is sent out for labelling.

    Attributes:
        round: Number of the round, from 1.
        seed: Fixes every choice of the annotator.
        folder: The workspace's root, below which files for people are written.
        labels: The labels that answers consist of; None for open-ended answers.
        suggestions: The model's answer to every record of the batch, None where it has none or where people are to
            answer without it; None for no suggestions at all.
        confidences: Calibrated confidence of each suggestion, the probability that it is right; None where unknown.
        suggested_by: Name of the model that suggests.
        accepted: Whether a suggestion stands without people; None for none.
        reasons: Why each record was selected, in words; None for none.
        candidates: Two answers to choose between for each record, in a loop on preferences; None elsewhere.
        selection: Id of the selection's artifact; None for none.
        partial: True to continue with the answers that are there, at least one.
        form: The form of answers with several parts; None for a label or a text.
    """

    round: int
    seed: int
    folder: Path
    labels: Sequence[str] | None = None
    suggestions: Sequence[str | None] | None = None
    confidences: Sequence[float | None] | None = None
    suggested_by: str | None = None
    accepted: Sequence[bool] | None = None
    reasons: Sequence[str] | None = None
    candidates: Sequence[Sequence[str]] | None = None
    selection: str | None = None
    partial: bool = False
    form: AnswerForm | None = None

    @property
    def kind(self) -> str:
        """The kind of answers, one of `posttrain.label.answer_kinds.KINDS`."""
        if self.candidates is not None:
            return "preference"
        if self.form is not None:
            return self.form.kind
        return "text" if self.labels is None else "choice"

    @property
    def label_set(self) -> Sequence[str] | None:
        """The closed set of answers; None for all others."""
        return self.labels if self.kind == "choice" else None

    def take(self, rows: Sequence[int]) -> Self:
        """Returns the request for a subset of the batch, by row."""

        def take(values: Sequence[Any] | None) -> list[Any] | None:
            return None if values is None else [values[row] for row in rows]

        return replace(
            self,
            suggestions=take(self.suggestions),
            confidences=take(self.confidences),
            accepted=take(self.accepted),
            reasons=take(self.reasons),
            candidates=take(self.candidates),
        )


class Annotator(ABC):
    """Answers batches of pool records."""

    name: str

    @abstractmethod
    def annotate(self, batch: pa.Table, request: AnnotationRequest) -> pa.Table:
        """Returns the records of ``batch``, in its order, with ``completion`` filled.

        ``id`` stays the pool record's; the dataset that takes the labels in computes the labelled records' own.
        ``meta`` gains ``labelled_by``: the annotator, the round and the seconds spent on the record (null where
        unknown).

        Raises:
            Waiting: answers are still missing; call again with the same arguments later.
            UserError: the answers that are there cannot be used.
        """

    def unlabelled(self, batch: pa.Table, request: AnnotationRequest) -> Mapping[str, str]:
        """Returns the reason, by record id, for each record of ``batch`` that `annotate` has left out.

        `LEFT` stands for those that nobody has decided; every other reason is one to skip the record.
        """
        return {}


def with_answers(
    batch: pa.Table,
    answers: Sequence[str],
    annotator: str,
    round: int,
    seconds: Sequence[float | None] | None = None,
    *,
    confidences: Sequence[float | None] | None = None,
) -> pa.Table:
    """Returns ``batch`` with the answers and their provenance; a model's answers have a confidence."""
    spent = seconds if seconds is not None else [None] * batch.num_rows
    provenances: list[dict[str, Any]] = [{"annotator": annotator, "round": round, "seconds": time} for time in spent]
    for provenance, confidence in zip(provenances, confidences or [], strict=False):
        check_confidence(confidence, f"the answers of {annotator}")
        provenance["confidence"] = confidence
    meta = [
        _with_provenance(before, provenance)
        for before, provenance in zip(batch["meta"].to_pylist(), provenances, strict=True)
    ]
    # `id` and `input_id` stay those of the pool, so that a label can be traced to the record that was sent out.
    filled = _replace_column(batch, "completion", list(answers))
    return _replace_column(filled, "meta", meta)


def labelled_by_model(labelled: pa.Table) -> list[bool]:
    """Returns whether a model gave each record's label, and not people or a file."""
    return [str(provenance.get("annotator", "")).startswith("model:") for provenance in _provenances(labelled)]


def _provenances(labelled: pa.Table) -> list[Mapping[str, Any]]:
    """Returns who gave each record's label as `with_answers` notes it; empty for one of a file or of feedback."""
    marks = [json.loads(meta or "{}").get("labelled_by") for meta in labelled["meta"].to_pylist()]
    # Feedback notes its name there, and a user's own column may have this name too.
    return [mark if isinstance(mark, dict) else {} for mark in marks]


def _with_provenance(meta: str | None, provenance: Mapping[str, Any]) -> str:
    # Sorted keys: the same labels must give the same bytes, and so the same artifact.
    return json.dumps({**json.loads(meta or "{}"), "labelled_by": provenance}, ensure_ascii=False, sort_keys=True)


def _replace_column(table: pa.Table, column: str, values: list[str]) -> pa.Table:
    return table.set_column(table.schema.get_field_index(column), column, pa.array(values, pa.string()))


def label_summary(
    labelled: pa.Table,
    suggestions: Sequence[str | None] | None = None,
    *,
    unlabelled: Sequence[str] = (),
    form: AnswerForm | None = None,
) -> dict[str, Any]:
    """Summarises a batch of labels for the report.

    Args:
        labelled: RECORD table as an annotator returns it.
        suggestions: Answers of the model, or of an earlier annotator, to the same records.
        unlabelled: The reason for each record of the batch without a label, as in `Annotator.unlabelled`.
        form: The form of answers with several parts, whose labels are the classes.

    Returns:
        ``labels``: their number; ``classes``: labels by class, most frequent first; ``annotators``: labels by
        annotator; ``seconds``: the time spent (None where unknown); ``compared`` and ``agreement``: records that have a
        suggestion, and the share of them whose label equals it (None where none has). Where there are any,
        ``dropped``: skipped records, ``skips``: their reasons with counts, and ``left``: records that nobody decided.
    """
    answers = labelled["completion"].to_pylist()
    sources = _provenances(labelled)
    # Labels from files carry no provenance, so every key may be missing.
    times = [source["seconds"] for source in sources if source.get("seconds") is not None]
    pairs = [
        (answer, suggestion)
        for answer, suggestion in zip(answers, suggestions or [None] * len(answers), strict=True)
        if suggestion is not None
    ]
    classes = Counter(answers if form is None else [label for answer in answers for label in form.labels_of(answer)])
    skips = Counter(reason for reason in unlabelled if reason != LEFT)
    left = len(unlabelled) - skips.total()
    return {
        "labels": len(answers),
        "classes": dict(sorted(classes.items(), key=lambda item: (-item[1], str(item[0])))),
        "annotators": dict(Counter(source.get("annotator", "unknown") for source in sources)),
        "seconds": sum(times) if times else None,
        "compared": len(pairs),
        "agreement": sum(answer == suggestion for answer, suggestion in pairs) / len(pairs) if pairs else None,
        # Only where there are any: the summary is part of the artifact's id.
        **({"dropped": skips.total(), "skips": dict(sorted(skips.items()))} if skips else {}),
        **({"left": left} if left else {}),
    }
