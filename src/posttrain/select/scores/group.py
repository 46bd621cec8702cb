"""What a model is asked to score, and the scores that it gives in one go."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from posttrain.models.task import TaskConfig, Turns
from posttrain.store.hashing import digest

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


@dataclass(frozen=True)
class Asked:
    """A record as far as its scores depend on it.

    Attributes:
        prompt: what the model is shown, without the task's system message and template.
        answers: what is scored after it; none where the model gives its own.
    """

    prompt: Turns
    answers: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        """64 hex characters: two records with the same have the same scores."""
        return digest([self.prompt, list(self.answers)])


@dataclass(frozen=True, eq=False)
class Group:
    """Scores that come of one pass over the records.

    Attributes:
        name: of the group; with version and settings it decides what is computed.
        version: raised by hand when its meaning changes.
        settings: all that the numbers depend on besides model, task and record, as JSON values.
        score: gives one row a record, in their order; with no record, the columns.
        at_once: records that are lost at most when the pass is killed.
    """

    name: str
    version: int
    settings: Mapping[str, Any]
    score: Callable[["LanguageModel", Sequence[Asked]], pa.Table]
    at_once: int


@dataclass(eq=False)
class ScoringModel:
    """A model that is only loaded once it is asked something new.

    Attributes:
        id: tells its weights.
        task: what it is asked to do.
        load: gives it: a language model, or a sentence model for a group that asks one.
    """

    id: str
    task: TaskConfig
    load: Callable[[], Any] = field(repr=False)

    @cached_property
    def lm(self) -> Any:
        """The model itself."""
        return self.load()

    @classmethod
    def of(cls, lm: "LanguageModel") -> "ScoringModel":
        """A model that is loaded; without an id, so that nothing of it can be kept."""
        return cls("", lm.task, lambda: lm)
