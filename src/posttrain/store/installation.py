"""How this program is installed: the commit that it is of, and the command that adds a package to it."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from posttrain import __version__

_PACKAGE = Path(__file__).parents[1]

COMMIT_FILE = _PACKAGE / "COMMIT"
"""The commit that a wheel was built from; written by the build (``tools/hatch_build.py``)."""

_SHORT = 12  # digits of a commit that are shown


def version_text() -> str:
    """Returns the version, with the commit where it is known, such as ``0.1.0 (1a2b3c4d5e6f)``."""
    commit = installed_commit()
    return f"{__version__} ({commit})" if commit else __version__


def installed_commit() -> str | None:
    """Returns the commit that runs: of the checkout, of the wheel, or of the repository that pip installed from.

    A checkout with changes that are not committed has ``+changes`` behind its commit.
    """
    root = _checkout()
    if root is not None:
        commit = _git(root, "rev-parse", f"--short={_SHORT}", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        return f"{commit}+changes" if commit and changes else commit or None
    if COMMIT_FILE.is_file():
        return COMMIT_FILE.read_text(encoding="ascii", errors="replace").strip() or None
    # PEP 610: what pip was asked to install.
    try:
        origin = json.loads(metadata.distribution("posttrain").read_text("direct_url.json") or "{}")
        return str(origin["vcs_info"]["commit_id"])[:_SHORT]
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None


def install_command(*packages: str, dependencies: bool = True) -> str:
    """Returns the command that adds packages to this installation, by the program that made it.

    Args:
        packages: Requirements such as ``s3fs`` or ``psycopg[binary]``. Those of posttrain's extras are named
            themselves, as ``posttrain[s3]`` means something only where a registry has posttrain.
        dependencies: False to leave out what the packages depend on.
    """
    names = " ".join(name if name.replace("-", "").isalnum() else f"'{name}'" for name in packages)
    folder = Path(sys.prefix)
    parts = folder.parts
    if not dependencies and _is_temporary(folder):
        return f"make an environment that stays (uv venv), and uv pip install posttrain and --no-deps {names} into it"
    if not dependencies:
        # Tools that own their environment cannot leave dependencies out: pip puts the files into it.
        if "pipx" in parts:
            return f"pipx runpip posttrain install --no-deps {names}"
        if _made_by_uv(folder):
            return f"uv pip install --python {sys.executable} --no-deps {names}"
        return f"{_pip()} install --no-deps {names}"
    if "pipx" in parts:
        return f"pipx inject posttrain {names}"
    options = " ".join(f"--with {name}" for name in names.split())
    if _is_temporary(folder):
        return f"uvx {options} and the same arguments"
    if "uv" in parts and "tools" in parts:
        return f"uv tool install {options} and the same source"
    return f"uv pip install {names}" if _made_by_uv(folder) else f"{_pip()} install {names}"


def file_system_hint(protocol: str) -> str:
    """Returns the command that installs what reads and writes URLs of this protocol."""
    package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs"}.get(protocol)
    return install_command(package) if package else f"install the fsspec package for {protocol}"


def _checkout() -> Path | None:
    """Returns the root of the checkout that the package lies in; None if it is installed."""
    root = _PACKAGE.parents[1]
    return root if _PACKAGE.parent.name == "src" and (root / ".git").exists() else None


def _git(root: Path, *arguments: str) -> str:
    """Returns what git prints; nothing if it is not installed, or refuses a repository of another user."""
    try:
        command = ["git", "-C", str(root), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def _is_temporary(folder: Path) -> bool:
    """Returns whether ``uvx`` made the environment, in its cache."""
    return any(part.startswith(("archive-v", "environments-v")) for part in folder.parts)


def _made_by_uv(folder: Path) -> bool:
    """Returns whether uv made the environment, which then has no pip."""
    try:
        return "uv = " in (folder / "pyvenv.cfg").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _pip() -> str:
    """Returns ``pip`` if the shell's pip is that of this Python, else pip by the path of this Python."""
    pip = shutil.which("pip")
    own = Path(sys.executable).parent
    return "pip" if pip and os.path.realpath(Path(pip).parent) == os.path.realpath(own) else f"{sys.executable} -m pip"
