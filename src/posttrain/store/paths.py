"""Checks paths that a user named before anything opens them: pipes, devices, looping links, impossible names."""

import errno
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from posttrain.store.errors import UserError, shorten, to_line

_SCHEME = re.compile("[a-z][a-z0-9+.-]+:")

_UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)


class PathProblem(NamedTuple):
    """A reason why a path cannot be used; ``kind`` is the category by which problems are counted."""

    kind: str
    message: str
    fix: str


def path_problem(path: Path) -> PathProblem | None:
    """Returns the problem of a path that no file or folder can have, or None; a missing file is not a problem here."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        # `Path` has taken one of the two slashes. A folder `s3:` would be made, and nothing arrive where it was meant.
        if any(_SCHEME.fullmatch(part) for part in path.parts[:-1]):
            return PathProblem("not a file", "is an address, not a path of this machine", "give a path")
        return None
    # A NUL is a ValueError; a name that is too long, a looping link and a folder without permission are OSErrors.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return PathProblem("unreadable file", f"cannot be read: {reason}", "check the path")
    # Checked before opening: to open a pipe without a writer blocks forever.
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return PathProblem("not a file", "is a pipe, a socket or a device, not a file", "save it to a file")
    return None


def check_path(path: Path, name: str | None = None) -> None:
    """Checks a path before it is used.

    Args:
        name: The path in errors, as the user wrote it; None for the path itself.

    Raises:
        UserError: it is a pipe, a socket or a device, its links loop, or no file can have such a name.
    """
    if problem := path_problem(path):
        shown = re.sub("^([a-z0-9+.-]+:)/(?!/)", r"\1//", str(path)) if name is None else name
        raise UserError(problem.message, where=_shown(shown), fix=problem.fix)


def locate_path(root: Path, name: str) -> Path:
    """Resolves a path that a config or a command names against ``root``, and checks it.

    Raises:
        UserError: as `check_path`, or ``~NAME`` names no user.
    """
    try:
        path = root / Path(name).expanduser()
    except RuntimeError:
        raise UserError("names no user's home", where=_shown(name), fix="check the path") from None
    check_path(path, name)
    return path


def to_path_mistake(error: Exception) -> UserError | None:
    """Returns the mistake that an operation on an impossible path stumbled over, or None for any other error."""
    if isinstance(error, OSError) and error.errno in _UNUSABLE and error.filename is not None:
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
        return UserError(f"cannot be read: {error.strerror}", where=_shown(name), fix="check the path")
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return UserError("a path holds a NUL character", fix="check the paths")
    # `Path.resolve` has an error of its own for links that loop.
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):
        return UserError("cannot be read: too many levels of symbolic links", where=str(error).split("'")[1])
    return None


def _shown(name: str) -> str:
    return shorten(to_line(name), 300)
