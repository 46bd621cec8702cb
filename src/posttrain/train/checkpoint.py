"""Checkpoints of a training in progress: written whole or not at all, verified on load, damaged ones stepped over."""

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.store.files import sync_file, sync_folder
from posttrain.store.hashing import file_digest

log = logging.getLogger("posttrain")

_KEEP = 2
_TENSORS, _STATE, _SUMS = "tensors.safetensors", "state.json", "sha256.json"


@dataclass(frozen=True)
class Checkpoint:
    """tensors: what the optimiser and the random generators hold; state: everything that is JSON."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints in one folder, newest last; the last two are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, checkpoint: Checkpoint) -> None:
        """Write a fresh folder, flush it to disk and give it its name in one rename."""
        target = self.folder / f"step-{step:09d}"
        fresh = self.folder / f"tmp-{step:09d}"
        for unfinished in self.folder.glob("tmp-*"):
            shutil.rmtree(unfinished)
        fresh.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}, fresh / _TENSORS)
        (fresh / _STATE).write_text(json.dumps(checkpoint.state), encoding="utf-8")
        sums = {name: file_digest(fresh / name) for name in (_TENSORS, _STATE)}
        (fresh / _SUMS).write_text(json.dumps(sums), encoding="utf-8")
        for path in fresh.iterdir():
            sync_file(path)
        sync_folder(fresh)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        sync_folder(self.folder)
        for old in self._names()[:-_KEEP]:
            shutil.rmtree(old)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose checksums hold, or None. Damaged ones are named in the log and removed."""
        for folder in reversed(self._names()):
            try:
                sums = json.loads((folder / _SUMS).read_text(encoding="utf-8"))
                wrong = [name for name in (_TENSORS, _STATE) if file_digest(folder / name) != sums[name]]
                if not wrong:
                    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
                    return Checkpoint(load_file(folder / _TENSORS), state)
                problem = f"{wrong[0]} does not match its checksum"
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                problem = str(error)
            log.warning("checkpoint %s is damaged (%s); going back to the one before", folder.name, problem)
            shutil.rmtree(folder)  # it would push a good one out of the last two
        return None

    def _names(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))
