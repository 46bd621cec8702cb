"""An annotator that reads its answers from a file, with an optional rate of wrong ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from posttrain.label.annotator import AnnotationRequest, Annotator, RecordReader, with_answers
from posttrain.store.errors import UserError, suggest


class Oracle(Annotator):
    """Looks answers up in a file of labelled records by their input.

    Args:
        file: The file of answers.
        columns: Its column mapping.
        read: Reads the file.
        error_rate: Share of wrong answers by round; rounds that are not named have none.
        name: The file's name in errors.
    """

    name = "oracle"

    def __init__(
        self,
        file: Path,
        columns: Mapping[str, str] | None,
        read: RecordReader,
        error_rate: Mapping[int, float] | None = None,
        name: str | None = None,
    ) -> None:
        self.file, self.columns, self.read = file, columns, read
        self.error_rate = dict(error_rate or {})
        self.source = name or str(file)

    def annotate(self, batch: pa.Table, request: AnnotationRequest) -> pa.Table:
        answer_of = self._answers()
        answers = []
        columns = (batch[column].to_pylist() for column in ("input_id", "source", "line"))
        # By the input's id, not the record's: the file of answers may give the same text another id.
        for identity, source, line in zip(*columns, strict=True):
            if identity not in answer_of:
                message = f"the oracle's file {self.source} has no answer for this record"
                raise UserError(message, where=f"{source}:{line}", fix="add its answer to `label.file`")
            answer, where = answer_of[identity]
            if request.label_set is not None and answer not in request.label_set:
                raise UserError(
                    f"label `{answer}` is not in the label set",
                    where=where,
                    fix=suggest(answer, request.label_set),
                )
            answers.append(answer)
        rate = self.error_rate.get(request.round, 0.0)
        answers = _corrupt_labels(answers, batch["input_id"].to_pylist(), rate, request)
        return with_answers(batch, answers, self.name, request.round)

    def _answers(self) -> dict[str, tuple[str, str]]:
        """Reads (answer, file:line) by input."""
        answer_of: dict[str, tuple[str, str]] = {}
        for table in self.read(self.file, self.columns):
            columns = (table[name].to_pylist() for name in ("input_id", "completion", "line"))
            for identity, answer, line in zip(*columns, strict=True):
                if answer is not None:
                    # Where the file answers one input twice, the first answer counts.
                    answer_of.setdefault(identity, (answer, f"{self.source}:{line}"))
        return answer_of


def _corrupt_labels(answers: list[str], inputs: Sequence[str], rate: float, request: AnnotationRequest) -> list[str]:
    """Replaces a share ``rate`` of the answers, rounded to whole records, by other labels of the set."""
    wrong = int(rate * len(answers) + 0.5)
    if not wrong:
        return answers
    if request.label_set is None or len(request.label_set) < 2:
        fix = "list the labels in `task.labels`; there is none for answers with several parts"
        raise UserError("wrong labels need a set of at least two labels", where="label.error_rate", fix=fix)
    draws = np.random.default_rng([request.seed, request.round])
    # By input, so that the order of the batch does not change which answers are wrong.
    order = sorted(range(len(answers)), key=lambda row: (inputs[row], row))
    corrupted = list(answers)
    for position in draws.choice(len(order), size=wrong, replace=False).tolist():
        row = order[position]
        others = [label for label in request.label_set if label != answers[row]]
        corrupted[row] = others[int(draws.integers(len(others)))]
    return corrupted
