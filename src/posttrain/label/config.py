"""The config section ``label``, and the annotator that it names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from posttrain.label.annotator import Annotator, RecordReader
from posttrain.label.file_annotator import FileAnnotator
from posttrain.label.oracle import Oracle
from posttrain.store.errors import UserError
from posttrain.store.section import Section


class LabelConfig(Section):
    """The annotator, the labels of a round, and the use of labels whose model was refused."""

    annotator: Literal["oracle", "file"] = Field(
        default="file",
        description="`oracle`: a file of answers; `file`: people, by an exported CSV.",
    )
    file: str | None = Field(default=None, description="File of answers of the oracle, relative to the workspace.")
    columns: dict[str, str] | None = Field(
        default=None, description="Columns of the oracle's file, by our name for each; null: as in `data.columns`."
    )
    per_round: int = Field(default=100, ge=1, description="Labels requested in a round.")
    budget: int | None = Field(default=None, ge=1, description="Labels of all rounds together; null: no limit.")
    error_rate: dict[int, Annotated[float, Field(ge=0, le=1)]] = Field(
        default={},
        description="Share of the oracle's labels to make wrong, by round, to rehearse a careless annotator.",
    )
    when_refused: Literal["keep", "set_aside", "auto"] = Field(
        default="auto",
        description="Labels of a round whose model was refused: `auto` discards them if it was surely worse.",
    )


# The reader is an argument: `label` and `data` are in the same layer and do not import each other.
AnnotatorFactory = Callable[[LabelConfig, Path, RecordReader, Mapping[str, str] | None], Annotator]


def build_annotator(
    config: LabelConfig, root: Path, read: RecordReader, columns: Mapping[str, str] | None = None
) -> Annotator:
    """Builds the annotator that ``config`` names.

    Args:
        config: The section.
        root: The workspace's root, where relative files start.
        read: Reads a file of records.
        columns: The column mapping that is used where ``config`` has none.

    Raises:
        UserError: something that this annotator needs is not in the config.
    """
    return ANNOTATORS[config.annotator](config, root, read, columns)


def _build_oracle(config: LabelConfig, root: Path, read: RecordReader, columns: Mapping[str, str] | None) -> Annotator:
    if config.file is None:
        raise UserError("the oracle needs a file of answers", where="label.file", fix="name it")
    # An empty mapping is a choice, too: the file's own names.
    mapping = config.columns if config.columns is not None else columns
    return Oracle(root / Path(config.file).expanduser(), mapping, read, config.error_rate, config.file)


def _build_file_annotator(
    config: LabelConfig, root: Path, read: RecordReader, columns: Mapping[str, str] | None
) -> Annotator:
    return FileAnnotator()


ANNOTATORS: dict[str, AnnotatorFactory] = {"oracle": _build_oracle, "file": _build_file_annotator}
