"""The split of requests between a champion and its canary: a file that servers read, and the rule that picks an arm.

The file ``.posttrain/canary.json`` is there while a canary runs. The rule needs SHA-256 and nothing else, so that
servers in every language pick the same arm: docs/server.md has it in a few lines.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, sync_folder, write_atomically
from posttrain.store.rows import Canary
from posttrain.store.workspace import Workspace

VERSION = 1
"""Version of the file's format."""


@dataclass(frozen=True)
class Arm:
    """A model that answers a share of the requests.

    Attributes:
        name: What feedback names as its ``arm``; None without a canary.
        model: Id of the model; None without a canary.
        path: The model's folder.
        share: Share of the requests, between 0 and 1.
    """

    name: str | None
    model: str | None
    path: Path
    share: float


@dataclass(frozen=True)
class TrafficSplit:
    """Arms whose shares add up to 1, and the salt of the rule, which is another one for each canary."""

    arms: tuple[Arm, ...]
    salt: str


def split_path(workspace: Workspace) -> Path:
    """Returns the path of the file, beside the champion's link."""
    return workspace.champion_path.with_name(workspace.champion_path.name.replace("champion", "canary", 1) + ".json")


def write_split(workspace: Workspace, canary: Canary) -> list[dict[str, object]]:
    """Writes the file of a canary that runs, atomically and only if it changes; returns its arms.

    Raises:
        DamagedArtifactError: one of the two models is missing or damaged; nothing is written.
        UserError: the disk refused.
    """
    # The canary first: it has the keys whose numbers lie below its share.
    models = (
        (canary.name, canary.model_id, canary.share),
        (canary.champion_name, canary.champion_id, 1 - canary.share),
    )
    arms = [Arm(name, model, _relative(workspace, model), share) for name, model, share in models]
    written = [{**asdict(arm), "path": str(arm.path)} for arm in arms]
    content = {
        "version": VERSION,
        "canary": canary.id,
        "since": canary.created_at.isoformat(),
        "salt": f"{canary.name}:{canary.model_id}",
        "arms": written,
    }
    path, text = split_path(workspace), json.dumps(content, indent=1) + "\n"
    with disk_errors(path):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text.encode())
    return written


def remove_split(workspace: Workspace) -> None:
    """Removes the file: from now on all requests are the champion's.

    Raises:
        UserError: the disk refused.
    """
    path = split_path(workspace)
    if path.exists():
        with disk_errors(path):
            path.unlink()
            sync_folder(path.parent)


def read_split(root: Path) -> TrafficSplit:
    """Reads how the requests of a workspace are split now; without a canary, the champion is the only arm.

    Args:
        root: The workspace's folder.

    Raises:
        UserError: the file was written by a newer version, or is damaged.
    """
    home = Path(root) / ".posttrain"
    path = home / "canary.json"
    try:
        content = json.loads(path.read_bytes())
        if content["version"] > VERSION:
            raise UserError("written by a newer version", where=str(path), fix="pip install --upgrade posttrain")
        arms = [Arm(arm["name"], arm["model"], home / arm["path"], float(arm["share"])) for arm in content["arms"]]
        return TrafficSplit(tuple(arms), str(content["salt"]))
    except FileNotFoundError:
        return TrafficSplit((Arm(None, None, home / "champion", 1.0),), "")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("damaged", where=str(path), fix="posttrain run writes it again") from error


def choose_arm(split: TrafficSplit, key: str) -> Arm:
    """Picks the arm of a request; the same key always has the same arm of one canary.

    The first 32 bits of SHA-256 over ``SALT:KEY`` in UTF-8, divided by 2^32, are a number in [0, 1); the arm is the
    first one whose share, added to those before it, exceeds that number.

    Args:
        split: The arms.
        key: Id of the user or of the request.
    """
    number = int(hashlib.sha256(f"{split.salt}:{key}".encode()).hexdigest()[:8], 16) / 2**32
    until = 0.0
    for arm in split.arms:
        until += arm.share
        if number < until:
            return arm
    return split.arms[-1]  # shares that add up to a little less than 1


def _relative(workspace: Workspace, model: str) -> Path:
    """Returns a model's folder, relative to the file's, so that the workspace can be moved."""
    folder = workspace.artifacts.path(model)
    return folder.relative_to(workspace.home) if folder.is_relative_to(workspace.home) else folder
