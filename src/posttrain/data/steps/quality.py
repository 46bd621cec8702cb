"""Filters records by a quality classifier that is trained on good and bad texts."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa
from filelock import FileLock
from pydantic import Field, model_validator

from posttrain.data.records.outcome import Outcome
from posttrain.data.records.record import TextField, joined_texts
from posttrain.data.steps.bounds import Bound, apply_bounds
from posttrain.data.steps.resources import (
    Files,
    check_exists,
    file_key,
    file_state,
    load_linear_classifier,
    resolve_path,
)
from posttrain.data.steps.step import RowStep
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder
from posttrain.store.hashing import digest

if TYPE_CHECKING:
    from posttrain.data.quality.classifier import LinearClassifier


class Quality(RowStep):
    """Keeps texts that resemble the good examples more than the bad ones.

    The classifier is a folder, or is trained from files of good and bad examples, once in every process. With both,
    the first process that needs it trains it and saves it in the folder for the others.

    Facts: ``quality``, the calibrated probability that a text is good.
    """

    name: ClassVar[str] = "quality"
    version: ClassVar[int] = 2

    quality_threshold: float | None = Field(
        0.5, ge=0, le=1, description="Lowest probability of being good that stays; null: report only."
    )
    model: str | None = Field(None, description="Folder of the classifier.")
    good: Files = Field([], description="Files of good examples, in any format that records are read from.")
    bad: Files = Field([], description="Files of bad examples.")
    field: TextField = Field("all", description="Text of a record to read: the input, the answer, or all.")

    @model_validator(mode="after")
    def _has_a_classifier(self) -> Self:
        if bool(self.good) != bool(self.bad):
            raise ValueError("give both `good` and `bad`")
        if not self.good and self.model is None:
            raise ValueError("give `model`, or files of `good` and `bad` examples")
        return self

    def located(self, root: Path) -> Self:
        places = {name: [resolve_path(root, file) for file in getattr(self, name)] for name in ("good", "bad")}
        return self.model_copy(update={**places, "model": self.model and resolve_path(root, self.model)})

    def check(self) -> None:
        for name in ("good", "bad"):
            for file in getattr(self, name):
                check_exists(file, f"quality.{name}")
        if not self.good:
            self._classifier()

    def key(self) -> dict[str, Any]:
        settings = super().key()
        if not self.good:
            # A folder that others may train again: its content counts, not its path.
            return {**settings, "model": file_key(str(self.model))}
        files = {name: [file_key(file) for file in getattr(self, name)] for name in ("good", "bad")}
        return {**settings, **files, "model": None}  # the folder where it is saved changes no result

    def apply(self, table: pa.Table) -> Outcome:
        probabilities = self._classifier().probabilities(joined_texts(table, self.field))
        bound = Bound("low quality", "quality", "at least", self.quality_threshold)
        return apply_bounds(table, self.name, {"quality": probabilities}, [bound])

    def _classifier(self) -> "LinearClassifier":
        if not self.good:
            return load_linear_classifier(str(self.model))
        # As JSON, because the cache's key must be hashable and settings hold lists.
        return _trained_classifier(self.model_dump_json(), tuple(file_state(file) for file in [*self.good, *self.bad]))

    def _train(self) -> "LinearClassifier":
        """Trains the classifier from the files, unless its folder holds it already."""
        if self.model is None:
            return self._learned({})
        from posttrain.data.quality.classifier import is_classifier, load_classifier

        folder = Path(self.model)
        make_folder(folder)
        examples = digest({name: value for name, value in self.key().items() if name not in _NOT_TRAINED})
        # Workers start together: without the lock each of them would train the same classifier.
        with FileLock(folder / "lock"):
            if is_classifier(folder):
                classifier = load_classifier(folder)
                if classifier.report.get("examples") != examples:
                    fix = "name another folder, or remove this one to train it again"
                    raise UserError("was trained on other examples or settings", where=self.model, fix=fix)
                return classifier
            classifier = self._learned({"examples": examples})
            classifier.save(folder)
            return classifier

    def _learned(self, extra: dict[str, Any]) -> "LinearClassifier":
        from posttrain.data.quality.classifier import train_quality

        good, bad = (self._texts(files) for files in (self.good, self.bad))
        return train_quality(good, bad, extra)

    def _texts(self, files: list[str]) -> list[str]:
        from posttrain.data.reading.reader import read

        return [text for file in files for table in read(Path(file)) for text in joined_texts(table, self.field)]


_NOT_TRAINED = frozenset({"version", "quality_threshold"})


@cache
def _trained_classifier(settings: str, states: tuple[str, ...]) -> "LinearClassifier":
    return Quality.model_validate_json(settings)._train()
