"""From the config to the annotator it names."""

from collections.abc import Callable, Mapping
from pathlib import Path

from posttrain.label.annotator import Annotator, Read
from posttrain.label.config import LabelConfig
from posttrain.label.file import FileAnnotator
from posttrain.label.oracle import Oracle
from posttrain.store.errors import UserError

Make = Callable[[LabelConfig, Path, Read, Mapping[str, str] | None], Annotator]


def annotator(config: LabelConfig, root: Path, read: Read, columns: Mapping[str, str] | None = None) -> Annotator:
    """The annotator that ``config`` names.

    Args:
        root: the workspace's root, where relative files start.
        read: reads a file of records; ``label`` and ``data`` do not know each other.
        columns: the column mapping used where ``config`` has none.

    Raises:
        UserError: something that this annotator needs is not in the config.
    """
    return ANNOTATORS[config.annotator](config, root, read, columns)


def _oracle(config: LabelConfig, root: Path, read: Read, columns: Mapping[str, str] | None) -> Annotator:
    if config.file is None:
        raise UserError("the oracle needs a file of answers", where="label.file", fix="name it")
    mapping = config.columns if config.columns is not None else columns
    return Oracle(root / Path(config.file).expanduser(), mapping, read, config.error_rate, config.file)


def _file(config: LabelConfig, root: Path, read: Read, columns: Mapping[str, str] | None) -> Annotator:
    return FileAnnotator()


ANNOTATORS: dict[str, Make] = {"oracle": _oracle, "file": _file}
