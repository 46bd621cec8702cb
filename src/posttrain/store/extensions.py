"""Loads parts by name on first use: built-in ones, entry points of other packages, dotted paths."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from posttrain.store.errors import UserError


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package (PEP 562).

    Args:
        package: its ``__name__``.
        homes: by public name the module, below the package, that has it; "" for a module of that name itself.
    """

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return (
            getattr(import_module(f"{package}.{homes[name]}"), name)
            if homes[name]
            else import_module(f"{package}.{name}")
        )

    return found


def load_object(path: str, where: str, root: Path | None = None) -> Callable[..., Any]:
    """Import ``package.module:function``.

    Args:
        path: the function.
        where: what the error names.
        root: a folder where modules are looked for too, after all others, from now on.

    Raises:
        UserError: if there is no such module or no such function in it, or the module fails, with its line.
    """
    if root is not None and (folder := str(root.resolve())) not in sys.path:
        sys.path.append(folder)
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"`{path}` is no dotted path", where=where, fix="write package.module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may do anything
        place = _failure_location(error)
        fix = "mend it" if place else "put it in the workspace's folder or on PYTHONPATH"
        said = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
        raise UserError(f"cannot import `{module_name}`: {said}{place}", where=where, fix=fix) from error
    function = getattr(module, name, None)
    if not callable(function):
        file = getattr(module, "__file__", None)
        what = f"module `{module_name}` has no function `{name}`"
        raise UserError(what, where=where, fix=f"add it to {file}" if file else None)
    return function  # type: ignore[no-any-return]


def _failure_location(error: BaseException) -> str:
    """Where a module failed, as `` (file:line)``: the broken line, or the user's line that led to the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.name == "<module>":  # what stands before it is the machinery of imports
            return f" ({frame.filename}:{frame.lineno})"
    return ""
