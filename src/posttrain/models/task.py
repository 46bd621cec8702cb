"""Defines a model's task: how a record becomes a prompt, and which answers are allowed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from posttrain.store.errors import UserError
from posttrain.store.paths import locate_path
from posttrain.store.section import Section
from posttrain.store.text_files import read_text
from posttrain.store.yaml_files import read_yaml

_TRAINED_CONFIG = "config.yaml"

Turns = list[dict[str, str]]
"""A conversation: ``[{"role": "user", "content": "..."}]``."""


class TaskConfig(Section):
    """The config section ``task``."""

    kind: Literal["answer", "preference"] = Field(
        "answer",
        description="`answer`: people answer prompts; `preference`: they choose between two of the model's answers.",
    )
    system: str | None = Field(None, description="System message put before every prompt.")
    template: str = Field("{prompt}", description="Text around the last user turn; {prompt} stands for it.")
    labels: list[str] | str | None = Field(
        None, description="The closed set of answers, or a file with one a line; null: free text."
    )
    max_new_tokens: int = Field(64, ge=1, description="Longest answer that is generated, in tokens.")

    @field_validator("template")
    @classmethod
    def _template_holds_the_prompt(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError("must contain {prompt}")
        return template

    @field_validator("labels", mode="before")
    @classmethod
    def _labels_are_text(cls, labels: Any) -> Any:
        """Refuses labels that YAML has read as another type."""
        # ``yes``, ``no``, ``on``, ``off``, numbers and dates without quotes: as text they would be another label.
        for number, label in enumerate(labels if isinstance(labels, list) else [], 1):
            if not isinstance(label, str):
                raise ValueError(f"label {number} is read as {label!r}, not as text; put it in quotes")
        return labels

    def with_labels_from(self, root: Path) -> "TaskConfig":
        """Returns the task with ``labels`` read from their file, relative to ``root``.

        Raises:
            UserError: if the file is missing, empty or not UTF-8, or a label is repeated.
        """
        labels = self.labels
        if isinstance(labels, str):
            path = locate_path(root, labels)
            if not path.is_file():
                raise UserError(
                    f"no such file: {labels}", where="task.labels", fix="write the labels there, one a line"
                )
            labels = [line.strip() for line in read_text(path, labels).splitlines() if line.strip()]
        if labels is not None:
            if len(labels) < 2:
                raise UserError("a label set needs at least two labels", where="task.labels", fix="add one")
            repeated = sorted({label for label in labels if labels.count(label) > 1})
            if repeated:
                raise UserError(f"label `{repeated[0]}` is repeated", where="task.labels", fix="remove one")
        return self.model_copy(update={"labels": labels})

    @property
    def label_set(self) -> list[str]:
        """The closed label set; empty for free text."""
        assert not isinstance(self.labels, str), "labels are read from their file first"
        return self.labels or []

    def turns(self, prompt: Turns) -> Turns:
        """Renders a record's prompt for the model: system message first, template around the last user turn."""
        turns = [dict(turn) for turn in prompt]
        for turn in reversed(turns):
            if turn["role"] == "user":
                # Not `format`: a template or a prompt may hold other braces, such as JSON.
                turn["content"] = self.template.replace("{prompt}", turn["content"])
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


def record_turns(record: Mapping[str, Any]) -> Turns:
    """Returns a record's prompt as turns; plain text becomes a user's turn; empty if the record has neither.

    Args:
        record: ``prompt`` and ``text`` by the record schema.
    """
    if record["prompt"]:
        return [{"role": turn["role"], "content": turn["content"]} for turn in record["prompt"]]
    return [{"role": "user", "content": record["text"]}] if record["text"] else []
