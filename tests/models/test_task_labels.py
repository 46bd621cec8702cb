"""The label set: from the config or from a file as spreadsheets write it, and its mistakes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError


@pytest.mark.parametrize("content", [b"card\ncash\n", b"\xef\xbb\xbfcard\r\n\r\n cash \r\n"])
def test_labels_from_a_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    assert TaskConfig(labels="labels.txt").with_labels_from(tmp_path).label_set == ["card", "cash"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "task.labels: no such file: labels.txt; write the labels there, one per line"),
        (b"card\ncaf\xe9\n", "labels.txt:2: holds bytes that are not UTF-8; save as UTF-8"),
        (b"card\n", "task.labels: a label set needs at least two labels; add one"),
        (b"card\ncash\ncard\n", "task.labels: label `card` is repeated; remove one"),
    ],
)
def test_a_file_without_a_label_set_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(UserError) as caught:
        TaskConfig(labels="labels.txt").with_labels_from(tmp_path)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "position", "value"),
    [("[yes, no]", 1, True), ("[one, 2]", 2, 2), ("[one, two, off]", 3, False), ("[1.5, two]", 1, 1.5)],
)
def test_labels_that_yaml_does_not_read_as_text_are_refused(text: str, position: int, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        TaskConfig.read(yaml.safe_load(f"labels: {text}"), "posttrain.yaml")
    message = f"label {position} is read as {value!r}, not as text; put it in quotes"
    assert str(caught.value) == f"posttrain.yaml: `labels`: {message}"
    quoted = yaml.safe_load("labels: ['yes', 'no']")
    assert TaskConfig.read(quoted, "posttrain.yaml").labels == ["yes", "no"]
