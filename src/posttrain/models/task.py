"""Defines a model's task: how a record becomes a prompt, and which answers are allowed."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from posttrain.models.answer_form import FORMS, AnswerForm, check_labels
from posttrain.store.errors import UserError, shorten
from posttrain.store.paths import locate_path
from posttrain.store.section import Section
from posttrain.store.text_files import read_text
from posttrain.store.yaml_files import read_yaml

_TRAINED_CONFIG = "config.yaml"

_PROMPT = "{prompt}"

_RATINGS = ("1", "2", "3", "4", "5")

Turns = list[dict[str, str]]
"""A conversation: ``[{"role": "user", "content": "..."}]``."""


class TaskConfig(Section):
    """The config section ``task``."""

    kind: Literal["answer", "preference", "rating", "choices", "spans"] = Field(
        "answer",
        description="`answer`: a label or a text; `rating`: a number; `choices`: several labels; `spans`: marked parts "
        "of the text; `preference`: people choose between two of the model's answers.",
    )
    system: str | None = Field(None, description="System message put before every prompt.")
    template: str = Field(
        _PROMPT,
        description="Text around the last user turn; {prompt} stands for it. Without one, `choices` and `spans` name "
        "the labels after it.",
    )
    labels: list[str] | str | None = Field(
        None,
        description="The closed set of answers, or a file with one per line; null: free text, and 1 to 5 of a rating.",
    )
    max_new_tokens: int = Field(
        64, ge=1, description="Longest answer that is generated, in tokens; not set: 256 for spans."
    )

    @field_validator("template")
    @classmethod
    def _template_holds_the_prompt(cls, template: str) -> str:
        if _PROMPT not in template:
            raise ValueError("must contain {prompt}")
        return template

    @field_validator("labels", mode="before")
    @classmethod
    def _labels_are_text(cls, labels: Any, info: ValidationInfo) -> Any:
        """Refuses labels that YAML has read as another type; the numbers of a rating need no quotes."""
        if info.data.get("kind") == "rating" and isinstance(labels, list):
            return [str(label) if type(label) is int else label for label in labels]
        # ``yes``, ``no``, ``on``, ``off``, numbers and dates without quotes: as text they would be another label.
        for number, label in enumerate(labels if isinstance(labels, list) else [], 1):
            if not isinstance(label, str):
                raise ValueError(f"label {number} is read as {label!r}, not as text; put it in quotes")
        return labels

    def with_labels_from(self, root: Path) -> "TaskConfig":
        """Returns the task with ``labels`` read from their file, relative to ``root``.

        Raises:
            UserError: if the file is missing, empty or not UTF-8, a label is repeated, or the kind needs others.
        """
        labels = self.labels
        if labels is None and self.kind == "rating":
            labels = list(_RATINGS)
        if isinstance(labels, str):
            path = locate_path(root, labels)
            if not path.is_file():
                raise UserError(
                    f"no such file: {labels}", where="task.labels", fix="write the labels there, one per line"
                )
            labels = [line.strip() for line in read_text(path, labels).splitlines() if line.strip()]
        if labels is not None:
            if len(labels) < (1 if self.kind in FORMS else 2):
                raise UserError("a label set needs at least two labels", where="task.labels", fix="add one")
            repeated = sorted({label for label in labels if labels.count(label) > 1})
            if repeated:
                raise UserError(f"label `{repeated[0]}` is repeated", where="task.labels", fix="remove one")
        self._check_labels(labels)
        # A list of spans is longer than a label or a sentence.
        length = (
            {"max_new_tokens": 256} if self.kind == "spans" and "max_new_tokens" not in self.model_fields_set else {}
        )
        return self.model_copy(update={"labels": labels, **length})

    def _check_labels(self, labels: list[str] | None) -> None:
        if labels is None and self.kind in FORMS:
            fix = "name the labels"
            raise UserError(f"a task of the kind `{self.kind}` needs its labels", where="task.labels", fix=fix)
        if self.kind == "choices":
            check_labels(labels or ())
        if self.kind == "rating":
            for label in labels or ():
                if not re.fullmatch(r"-?(0|[1-9][0-9]{0,8})", label):
                    what = f"rating `{shorten(label)}` is not a whole number"
                    raise UserError(what, where="task.labels", fix="name numbers, such as [1, 2, 3]")

    @property
    def label_set(self) -> list[str]:
        """The closed set of answers; empty where answers are free text or have several parts."""
        return [] if self.kind in FORMS else self.label_names

    @property
    def label_names(self) -> list[str]:
        """The labels that answers consist of; empty for free text."""
        assert not isinstance(self.labels, str), "labels are read from their file first"
        return self.labels or []

    @property
    def has_label_set(self) -> bool:
        """Whether `label_set` will hold labels, without reading their file."""
        return self.kind == "rating" or (bool(self.labels) and self.kind not in FORMS)

    @property
    def form(self) -> AnswerForm | None:
        """The form of answers with several parts; None for answers that are one text."""
        return FORMS[self.kind](self.label_names) if self.kind in FORMS else None

    @property
    def read_answer(self) -> Callable[[str, str], str] | None:
        """Returns the one text of an answer that a file gives as text or JSON, by the text that is labelled.

        None where files hold answers as they are. The function raises a UserError for an answer that cannot be used.
        """
        if self.kind == "rating":
            return self._read_rating
        return self.form.read if self.form else None

    def _read_rating(self, answer: str, text: str) -> str:
        if answer.strip() not in self.label_set:
            what = f"`{shorten(answer)}` is not one of the ratings {', '.join(self.label_set)}"
            raise UserError(what, fix="correct it, or name it in task.labels")
        return answer.strip()

    @property
    def key(self) -> dict[str, Any]:
        """The part of a stage's key that prompts and answers of a model depend on."""
        # Without the kind: for the same template it changes neither.
        return self.model_dump(mode="json", exclude={"kind"}) | {"template": self.full_template}

    @property
    def full_template(self) -> str:
        """The text around the last user turn, with the labels where the user has not written one."""
        if self.form is None or self.template != _PROMPT:
            return self.template
        return f"{_PROMPT}\n\n{self.form.instruction}"

    def turns(self, prompt: Turns) -> Turns:
        """Renders a record's prompt for the model: system message first, template around the last user turn."""
        turns = [dict(turn) for turn in prompt]
        for turn in reversed(turns):
            if turn["role"] == "user":
                # Not `format`: a template or a prompt may hold other braces, such as JSON.
                turn["content"] = self.full_template.replace(_PROMPT, turn["content"])
                break
        if self.system is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system})
        return turns


def trained_task(folder: Path) -> TaskConfig | None:
    """Returns the task that `posttrain train` has written beside a model; None where it has not trained it.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / _TRAINED_CONFIG
    if not file.is_file():
        return None
    task = read_yaml(file).get("task")
    return TaskConfig.read(task, str(file)).with_labels_from(folder) if isinstance(task, dict) else None


def labelled_text(prompt: Sequence[Mapping[str, str]] | None, text: str | None) -> str:
    """Returns the text that parts of an answer are about: the last turn, or the plain text."""
    return prompt[-1]["content"] if prompt else text or ""


def record_turns(record: Mapping[str, Any]) -> Turns:
    """Returns a record's prompt as turns; plain text becomes a user's turn; empty if the record has neither.

    Args:
        record: ``prompt`` and ``text`` by the record schema.
    """
    if record["prompt"]:
        return [{"role": turn["role"], "content": turn["content"]} for turn in record["prompt"]]
    return [{"role": "user", "content": record["text"]}] if record["text"] else []
