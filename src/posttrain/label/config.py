"""The config section ``label``, and the annotator that it names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from posttrain.label.annotator import Annotator, RecordReader
from posttrain.label.model_annotators import TEACHERS, ModelAnnotator, PseudoConfig, TeacherName
from posttrain.label.oracle import Oracle
from posttrain.label.people import PeopleAnnotator
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import QueueConfig
from posttrain.models.endpoint import EndpointConfig
from posttrain.models.ensembles.config import EnsembleConfig, check_task
from posttrain.store.errors import UserError
from posttrain.store.metadata import Metadata
from posttrain.store.paths import locate_path
from posttrain.store.section import Section
from posttrain.store.webhook import check_webhook


class LabelConfig(Section):
    """The annotator, the labels of a round, and the models that label."""

    annotator: Literal["people", "oracle", "champion", "linear", "endpoint", "vote", "ensemble"] = Field(
        default="people",
        description="`people`: people, on the pages or in a CSV; `oracle`: a file of answers; or a model: "
        "`champion`, `linear`, `endpoint`, `vote` or `ensemble`; what a model cannot answer goes to people.",
    )
    queue: QueueConfig = Field(default=QueueConfig(), description="How items are given to people.")
    suggest: TeacherName = Field(
        default="champion",
        description="The model whose answers people see: champion, linear, endpoint, vote (of these) or ensemble.",
    )
    accept_error: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Bound on the error of suggestions that are accepted without people, such as 0.02: "
        "accepted is what is sure enough for held-out answers to show it at 95%; null: people answer everything.",
    )
    embedder: str | None = Field(
        default="minilm",
        description="Sentence model of the linear head: a folder, a Hub id or `minilm`; null: there is no head.",
    )
    ensemble: str | None = Field(
        default=None, description="File of the teacher `ensemble`, relative to the workspace; see docs/ensembles.md."
    )
    endpoint: EndpointConfig | None = Field(default=None, description="The server of the teacher `endpoint`.")
    pseudo: PseudoConfig | None = Field(
        default=None, description="Pseudo-labels of the pool that join training; null: none."
    )
    file: str | None = Field(default=None, description="File of answers of the oracle, relative to the workspace.")
    webhook: str | None = Field(
        default=None,
        description="URL that gets a JSON POST when a batch is ready (`batch ready`), when all of it is decided "
        "(`batch done`), and for alarms (`alarm`).",
    )
    per_round: int = Field(
        default=100, ge=0, description="Labels requested in a round; 0: none, rounds train on labelled files alone."
    )
    budget: int | None = Field(default=None, ge=1, description="Labels of all rounds together; null: no limit.")
    error_rate: dict[int, Annotated[float, Field(ge=0, le=1)]] = Field(
        default={},
        description="Share of the oracle's labels to make wrong, by round, to rehearse a careless annotator.",
    )

    @field_validator("webhook")
    @classmethod
    def _is_a_web_address(cls, webhook: str | None) -> str | None:
        return check_webhook(webhook)

    @property
    def teacher(self) -> TeacherName:
        """The model whose answers are suggested, or count as labels."""
        return next((name for name in TEACHERS if name == self.annotator), self.suggest)

    @property
    def teachers(self) -> set[str]:
        """The models that are used, those of a vote included."""
        names: set[str] = {self.teacher, *([self.pseudo.teacher] if self.pseudo else [])}
        return names | (set(self.voters) if "vote" in names else set())

    @property
    def voters(self) -> list[TeacherName]:
        """The models whose most frequent answer is the vote's."""
        voters: list[TeacherName] = ["champion", "linear"]
        return [*voters, "endpoint"] if self.endpoint else voters

    def check_models(self, has_labels: bool, root: Path) -> None:
        """Checks that the models that label can be used, without loading one.

        Args:
            has_labels: whether the task has a closed label set.
            root: the workspace's folder.

        Raises:
            UserError: one is not configured or not installed, or needs a closed label set.
        """
        for name, where in ((self.teacher, "label.suggest"), (self.pseudo and self.pseudo.teacher, "label.pseudo")):
            if name in ("linear", "vote") and not has_labels:
                raise UserError(f"`{name}` needs a closed label set", where=where, fix="set task.labels")
        if (self.pseudo or self.accept_error) and not has_labels:
            where = "label.pseudo" if self.pseudo else "label.accept_error"
            raise UserError("it needs a closed label set", where=where, fix="set task.labels, or null here")
        if "linear" in self.teachers:
            from posttrain.models.embedder_source import find_embedder

            if self.embedder is None:
                raise UserError("the linear head needs a sentence model", where="label.embedder", fix="name one")
            try:
                find_embedder(self.embedder)
            except UserError as error:
                raise UserError(error.what, where="label.embedder", fix=error.fix) from None
        if "ensemble" in self.teachers:
            if self.ensemble is None:
                raise UserError("the teacher `ensemble` needs a file", where="label.ensemble", fix="name it")
            where = f"label.ensemble: {self.ensemble}"
            check_task(EnsembleConfig.load(locate_path(root, self.ensemble), where), has_labels, where)
        if "endpoint" in self.teachers and self.endpoint is None:
            fix = "set label.endpoint.base_url and label.endpoint.model"
            raise UserError("the teacher `endpoint` needs a server", where="label.endpoint", fix=fix)


# The reader is an argument: `label` and `data` are in the same layer and do not import each other.
AnnotatorFactory = Callable[[LabelConfig, Path, RecordReader, Mapping[str, str] | None, Metadata | None], Annotator]


def build_annotator(
    config: LabelConfig,
    root: Path,
    read: RecordReader,
    columns: Mapping[str, str] | None = None,
    metadata: Metadata | None = None,
) -> Annotator:
    """Builds the annotator that ``config`` names.

    Args:
        config: The section.
        root: The workspace's root, where relative files start.
        read: Reads a file of records.
        columns: The column mapping of files of records.
        metadata: The workspace's database, where people's queue is; the oracle needs none.

    Raises:
        UserError: something that this annotator needs is not in the config.
    """
    annotator = ANNOTATORS[config.annotator](config, root, read, columns, metadata)
    return ModelAnnotator(config.teacher, annotator) if config.accept_error is not None else annotator


def _build_oracle(
    config: LabelConfig,
    root: Path,
    read: RecordReader,
    columns: Mapping[str, str] | None,
    metadata: Metadata | None,
) -> Annotator:
    if config.file is None:
        raise UserError("the oracle needs a file of answers", where="label.file", fix="name it")
    return Oracle(root / Path(config.file).expanduser(), columns, read, config.error_rate, config.file)


def _build_people(
    config: LabelConfig,
    root: Path,
    read: RecordReader,
    columns: Mapping[str, str] | None,
    metadata: Metadata | None,
) -> PeopleAnnotator:
    if metadata is None:
        raise ValueError("people answer through the queue in the workspace's database")
    gold = config.queue.gold_file
    queue = Queue(metadata, config.queue)
    return PeopleAnnotator(queue, read, None if gold is None else locate_path(root, gold), columns)


def _build_model_annotator(
    config: LabelConfig,
    root: Path,
    read: RecordReader,
    columns: Mapping[str, str] | None,
    metadata: Metadata | None,
) -> Annotator:
    people = _build_people(config, root, read, columns, metadata)
    # With a bound it is built around the annotator, whichever that is.
    return people if config.accept_error is not None else ModelAnnotator(config.teacher, people)


ANNOTATORS: dict[str, AnnotatorFactory] = {
    "people": _build_people,
    "oracle": _build_oracle,
    **dict.fromkeys(TEACHERS, _build_model_annotator),
}
