"""Defines an entry of user feedback, and the record that it makes."""

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.data.reading.conversion import shape_of
from posttrain.data.reading.messages import InvalidRecord
from posttrain.data.reading.rows import Problem, check_row, unknown_label_problem
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.store.section import Section
from posttrain.store.text_files import normalise_lines

Kind = Literal["labelled", "preferences", "pool"]
KINDS: tuple[Kind, ...] = ("labelled", "preferences", "pool")

MAX_RATING = 1_000_000
"""The largest rating; far beyond it, other readers take no integers."""


class Feedback(Section):
    """Validates one entry of feedback, as it is posted."""

    id: str = Field(min_length=1, max_length=200, description="Chosen by the sender; a repeated entry adds nothing.")
    prompt: str | list[dict[str, Any]] = Field(description="The prompt: text, or turns with role and content.")
    completion: str | None = Field(None, description="The model's answer.")
    rating: Literal["up", "down"] | int | float | None = Field(
        None, description="up, down, or a number of at most a million."
    )
    corrected_answer: str | None = Field(None, description="The right answer.")
    arm: str | None = Field(
        None, min_length=1, max_length=100, description="The arm of a canary that answered; see docs/server.md."
    )
    metadata: dict[str, Any] = Field({}, description="Further facts, such as the model and the time.")

    @field_validator("id", "arm")
    @classmethod
    def _id_is_one_line(cls, id: str | None) -> str | None:
        if id is not None and (not id.isprintable() or id != id.strip()):
            raise ValueError("must be one line of visible characters without spaces around it")
        return id

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_is_text_or_turns(cls, prompt: object) -> object:
        if not isinstance(prompt, str | list):
            raise ValueError("must be text, or turns with role and content")
        return prompt

    @field_validator("rating", mode="before")
    @classmethod
    def _rating_is_a_word_or_a_number(cls, rating: object) -> object:
        number = isinstance(rating, int | float) and not isinstance(rating, bool)
        if rating not in ("up", "down", None) and not number:
            raise ValueError("must be up, down or a number")
        # The comparison is false for NaN, and exact for integers that no float can hold.
        if number and not -MAX_RATING <= rating <= MAX_RATING:  # type: ignore[operator]
            raise ValueError(f"must be at most {MAX_RATING:,} and at least -{MAX_RATING:,}")
        return rating

    @field_validator("*")
    @classmethod
    def _integers_fit(cls, value: Any) -> Any:
        # Instead of the limit of a config: metadata may hold times in milliseconds.
        return value

    @field_validator("prompt", "metadata")
    @classmethod
    def _numbers_are_finite(cls, value: Any) -> Any:
        try:
            # A JSON number may be one that Python reads as infinite, and JSON cannot hold it again.
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError("holds a number that is too large") from None
        return value

    @model_validator(mode="after")
    def _it_makes_a_record(self) -> Self:
        if not (self.completion or "").strip() and not (self.corrected_answer or "").strip():
            raise ValueError("needs a `completion`, a `corrected_answer`, or both")
        if self.rating is None and self.corrected_answer is None:
            raise ValueError("needs a `rating`, a `corrected_answer`, or both")
        try:
            # Refused now, while the sender can mend it, rather than when the inbox is read.
            _prompt_shape().convert({"prompt": self.prompt, "completion": self.completion})
        except InvalidRecord as bad:
            raise ValueError(f"{bad.message}; {bad.fix}" if bad.fix else bad.message) from None
        return self

    def content(self) -> str:
        """Digest that distinguishes the same feedback, sent again, from other feedback under its id."""
        return digest(self.model_dump(mode="json"))


def read_entry(entry: Mapping[str, Any]) -> Feedback:
    """Checks an entry as the inbox holds it: ``received``, when it was acknowledged, and ``feedback``.

    Raises:
        UserError: it is no such entry, whatever its checksum says.
    """
    feedback = entry.get("feedback")
    if not isinstance(entry.get("received"), str) or not isinstance(feedback, dict):
        raise UserError("an entry has `received`, a time, and `feedback`, an object")
    if isinstance(problem := check_row(feedback, "feedback", 1), Problem):
        raise UserError(problem.message)
    return Feedback.read(feedback, "feedback")


class Ratings(Section):
    """Decides which numbers approve and which refuse; the words up and down need no such rule.

    The defaults are for 0 and 1 and for -1 and 1.
    """

    up_from: float = Field(1.0, description="The least number that approves; 4 of five stars.")
    down_to: float = Field(0.0, description="The greatest number that refuses; 2 of five stars.")

    @model_validator(mode="after")
    def _they_do_not_meet(self) -> Self:
        if self.down_to >= self.up_from:
            raise ValueError("`down_to` must be less than `up_from`")
        return self

    def of(self, rating: str | float | None) -> Literal["up", "down"] | None:
        """The direction of a rating; None if it is neutral."""
        if rating is None or rating == "up" or rating == "down":
            return rating  # type: ignore[return-value]
        number = float(rating)
        return "up" if number >= self.up_from else "down" if number <= self.down_to else None


def feedback_row(feedback: Mapping[str, Any], received: str, ratings: Ratings) -> tuple[Kind, dict[str, Any]]:
    """Builds the row that feedback makes, in an accepted shape, and names the set that it belongs to.

    A corrected answer is a label, and with a refused completion the chosen answer of a preference pair. An approved
    completion is a label. All other feedback makes a prompt without a known answer; its ``meta`` keeps the model's.

    Args:
        received: ISO 8601, when it was acknowledged.
    """
    completion, corrected = feedback.get("completion"), feedback.get("corrected_answer")
    rating = feedback.get("rating")
    direction = ratings.of(rating)
    note = {
        "id": feedback["id"],
        "rating": rating,
        "received": received,
        **({"arm": feedback["arm"]} if feedback.get("arm") else {}),
        **_nested_metadata(feedback.get("metadata") or {}),
    }
    prompt = {"prompt": feedback["prompt"]}
    if corrected is not None and corrected.strip():
        meta = {"labelled_by": "feedback", "feedback": note}
        # A pair of answers that differ only in whitespace teaches nothing.
        if direction == "down" and completion and normalise_lines(completion) != normalise_lines(corrected):
            return "preferences", {**prompt, "chosen": corrected, "rejected": completion, "meta": meta}
        return "labelled", {**prompt, "completion": corrected, "meta": meta}
    if direction == "up" and completion and completion.strip():
        meta = {"labelled_by": "feedback", "feedback": note}
        return "labelled", {**prompt, "completion": completion, "meta": meta}
    return "pool", {**prompt, "meta": {"feedback": {**note, "completion": completion}}}


def outcome_of(feedback: Mapping[str, Any], ratings: Ratings = Ratings()) -> bool | None:  # noqa: B008
    """Returns whether feedback calls the model's answer good; None if it does not say.

    A rating decides. Without one, a corrected answer decides: it is the model's own, or it refuses that one.
    """
    if (rating := feedback.get("rating")) is not None:
        direction = ratings.of(rating)
        return None if direction is None else direction == "up"
    completion, corrected = (normalise_lines(feedback.get(name) or "") for name in ("completion", "corrected_answer"))
    return completion == corrected if completion and corrected else None


def unknown_answer(feedback: Feedback, labels: Collection[str], ratings: Ratings = Ratings()) -> str | None:  # noqa: B008
    """Describes a label outside the closed label set; None if there is no such label.

    Args:
        labels: the closed label set; empty for open-ended answers.
    """
    _, row = feedback_row(feedback.model_dump(mode="json"), "", ratings)
    answer = row.get("completion", row.get("chosen"))
    if not labels or answer is None or answer in labels:
        return None
    problem = unknown_label_problem(answer, labels, "", 1)
    return f"{problem.message}; {problem.fix}" if problem.fix else problem.message


def _nested_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Nests the metadata in an object of its own, so that it cannot replace our fields."""
    return {"metadata": json.loads(json.dumps(metadata))} if metadata else {}


def _prompt_shape() -> Any:
    return shape_of(("prompt",))
