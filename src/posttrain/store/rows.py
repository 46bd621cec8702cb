"""The rows of the metadata database as frozen dataclasses."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

RUN_STATUSES = ("running", "done", "failed", "waiting")
ROUND_STATUSES = ("open", "waiting", "done")
ACTIONS = ("baseline", "promote", "rollback")
CANARY_STATUSES = ("running", "promoted", "rolled_back", "kept", "stopped")
HOOK_STATUSES = ("pending", "done", "failed", "none")
ROLES = ("owner", "reviewer", "annotator", "viewer", "model")
TOKEN_KINDS = ("session", "api", "invitation", "link")
BATCH_STATUSES = ("open", "done")
ITEM_STATUSES = ("open", "review", "done", "dropped")
ANSWER_STATUSES = ("answered", "skipped", "flagged")


@dataclass(frozen=True)
class ArtifactRow:
    """An artifact's row; the artifact store has its files.

    Attributes:
        size: Bytes of all files together.
        files: Number of files.
    """

    id: str
    kind: str
    meta: dict[str, Any]
    size: int
    files: int
    created_at: datetime


@dataclass(frozen=True)
class Run:
    """An execution of a stage. Times are UTC.

    Attributes:
        key: Hash of stage, version, inputs, config and seed, which the output depends on; 64 hex characters.
        inputs: Artifact ids (or digests of things outside the store) by their role.
        output: The artifact that a finished run made.
        worker: Id of the process that began it in `posttrain.store.workers`.
        seconds: Time of work; None while running, or if the process was killed.
        detail: Facts about the run that its output does not hold.
    """

    id: str
    stage: str
    key: str
    round: int | None
    status: str
    seed: int
    config: dict[str, Any]
    inputs: dict[str, str]
    output: str | None
    code_version: str
    environment: dict[str, Any]
    worker: str | None
    started_at: datetime
    finished_at: datetime | None
    seconds: float | None
    detail: dict[str, Any]
    error: str | None


@dataclass(frozen=True)
class Round:
    """A round of the loop: status ``open``, ``waiting`` or ``done``; times are UTC."""

    number: int
    status: str
    champion_before: str | None
    candidate: str | None
    decision: dict[str, Any] | None
    detail: dict[str, Any]
    started_at: datetime
    finished_at: datetime | None
    seconds: float | None


@dataclass(frozen=True)
class Deployment:
    """A model that became the champion, and why.

    Attributes:
        action: ``baseline``, ``promote`` or ``rollback``.
        hook: Status of the user's command or webhook: ``pending``, ``done``, ``failed`` or ``none``.
    """

    id: int
    model_id: str
    round: int | None
    action: str
    reason: str
    created_at: datetime
    hook: str


@dataclass(frozen=True)
class Canary:
    """A model that takes a share of the requests next to the champion, until outcomes decide.

    Attributes:
        champion_id: The model that it is compared with.
        deployment_id: The deployment that put this champion in service.
        share: Share of the requests, between 0 and 1.
        status: ``running``; ``promoted``; ``rolled_back``; ``kept``: undecided in time, so that the champion stays;
            ``stopped``: by a person, or because the champion changed.
        reason: Reason of its start.
        conclusion: Reason of its end; None while it runs.
        detail: The numbers of the last judgement, see `posttrain.loop.canary.Judgement`.
        hook: Status of the user's command or webhook, see `Deployment`.
    """

    id: int
    model_id: str
    champion_id: str
    deployment_id: int
    share: float
    status: str
    reason: str
    conclusion: str | None
    detail: dict[str, Any]
    created_at: datetime
    finished_at: datetime | None
    hook: str

    @property
    def name(self) -> str:
        """The name of its arm, such as ``canary-3``."""
        return f"canary-{self.id}"

    @property
    def champion_name(self) -> str:
        """The name of the champion's arm, such as ``champion-3``."""
        # Numbered as well: late outcomes of an earlier canary must not count for this one.
        return f"champion-{self.id}"


@dataclass(frozen=True)
class NamedVersion:
    """A version of a name, such as ``support@v3``.

    Attributes:
        version: Number of the version, from 1 under each name.
        parent: The artifact that it grew from.
        semantic: Semantic version such as ``2.3.1``, if its author gave one.
        note: A comment of its author.
        tags: Aliases that point to it now, such as ``production``.
    """

    name: str
    version: int
    artifact_id: str
    parent: str | None
    created_at: datetime
    semantic: str | None = None
    note: str | None = None
    tags: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The name with its version, such as ``support@v3``."""
        return f"{self.name}@v{self.semantic or self.version}"
