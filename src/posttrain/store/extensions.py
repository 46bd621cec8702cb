"""Loads parts by name on first use: built-in ones, entry points of installed packages, dotted paths from the config.

A table ``Registry("selector", "posttrain.selectors", {"random": "module:Name"})`` imports nothing until a name is
looked up. Other packages publish theirs as entry points of the same group::

    [project.entry-points."posttrain.selectors"]
    longest = "my_package.selectors:longest"

and a config may name any importable part as ``my_package.selectors:longest``.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from posttrain.store.errors import UserError, suggest

Part = TypeVar("Part")

_DOTTED_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Registry(Mapping[str, Part], Generic[Part]):
    """Maps names to parts of one kind and imports a part when it is first looked up.

    Iteration yields the built-in names in their order and then those of entry points. A lookup also takes a dotted path
    (``package.module:Name``), and ``in`` is true for anything that has the form of one.

    Args:
        kind: Noun for messages, such as ``selector``.
        group: Group of the entry points by which other packages add parts, such as ``posttrain.selectors``.
        builtin: Every built-in part or its dotted path, by name. An entry point cannot replace a built-in name.
        base: Class that every part subclasses or is an instance of; checked for parts of other packages.
    """

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str | Part], base: type | None = None) -> None:
        self.kind = kind
        self.group = group
        self.builtin = dict(builtin)
        self.base = base
        self._loaded: dict[str, Part] = {}

    def __getitem__(self, name: str) -> Part:
        return self.load(name, f"{self.kind} {name}")

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        # Sorted: the order of entry points follows the installation and would change help texts between machines.
        yield from sorted(self._published.keys() - self.builtin.keys())

    def __len__(self) -> int:
        return len(self.builtin.keys() | self._published.keys())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.builtin or name in self._published or is_dotted_path(name))

    def load(self, name: str, where: str) -> Part:
        """Imports and returns a part.

        Args:
            name: A built-in name, one of an entry point, or a dotted path.
            where: The config key that names the part, for errors.

        Raises:
            KeyError: no part has this name.
            UserError: its module cannot be imported, or holds no such part.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name, where)
        return self._loaded[name]

    def check(self, name: str) -> str:
        """Returns ``name`` if there is such a part, and imports it if it is not built in; for pydantic validators.

        Raises:
            ValueError: no part has this name, with the most similar one; or the part cannot be imported.
        """
        if name not in self:
            raise ValueError(f"there is no {self.kind} `{name}`; {suggest(name, self) or 'none is installed'}")
        if name not in self.builtin:
            try:
                self.load(name, f"{self.kind} {name}")
            except UserError as error:
                raise ValueError(str(error)) from None  # pydantic adds the config key
        return name

    @cached_property
    def _published(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def _load(self, name: str, where: str) -> Part:
        if name in self.builtin:
            builtin = self.builtin[name]
            if not isinstance(builtin, str):
                return builtin
            # Not through `load_object`: a fault in our own module is a bug and keeps its traceback.
            module, _, attribute = builtin.partition(":")
            part: Part = getattr(importlib.import_module(module), attribute)
            return part
        point = self._published.get(name)
        if point is None and not is_dotted_path(name):
            raise KeyError(name)
        path = point.value if point else name
        part = load_object(path, where)
        if self.base and not isinstance(part, self.base) and not _is_subclass(part, self.base):
            fix = f"derive it from {self.base.__module__}.{self.base.__qualname__}"
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise UserError(f"`{path}` is not {article} {self.kind}", where=where, fix=fix)
        if missing := getattr(part, "__abstractmethods__", None):
            raise UserError(f"`{path}` does not define {', '.join(sorted(missing))}", where=where, fix="define it")
        return part


def is_dotted_path(text: str) -> bool:
    """Returns whether ``text`` has the form ``package.module:Name``."""
    return _DOTTED_PATH.fullmatch(text) is not None


def load_object(path: str, where: str) -> Any:
    """Imports ``package.module:Name``.

    Args:
        path: A class, a function or an instance.
        where: The config key or part named in errors.

    Raises:
        UserError: the module does not exist, fails (with its line) or has no such name.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"`{path}` is not a dotted path", where=where, fix="write package.module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may do anything, such as call `sys.exit`
        location = _failure_location(error)
        fix = "fix it" if location else "put it in the workspace's folder or on PYTHONPATH"
        message = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
        raise UserError(f"cannot import `{module_name}`: {message}{location}", where=where, fix=fix) from error
    if not hasattr(module, name):
        file = getattr(module, "__file__", None)
        raise UserError(
            f"module `{module_name}` has no `{name}`", where=where, fix=f"add it to {file}" if file else None
        )
    return getattr(module, name)


def load_function(path: str, where: str) -> Callable[..., Any]:
    """Imports ``package.module:function``, as `load_object` does.

    Raises:
        UserError: as `load_object`, or the object is not callable.
    """
    function = load_object(path, where)
    if not callable(function):
        raise UserError(f"`{path}` is not a function", where=where, fix="name a function")
    return function  # type: ignore[no-any-return]


def add_module_folder(root: Path) -> None:
    """Lets modules be imported from ``root``, such as a workspace, after all other folders."""
    if (folder := str(root.resolve())) not in sys.path:
        # Last, not first: a file such as `random.py` in a workspace must not shadow an installed package.
        sys.path.append(folder)


def lazy_exports(package: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a ``__getattr__`` for a package that imports its public names on first use (PEP 562).

    Args:
        package: The package's ``__name__``.
        exports: Module below the package that defines each public name; "" for a module of that name itself.
    """

    def get(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not exports[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{exports[name]}"), name)

    return get


def _is_subclass(part: Any, base: type) -> bool:
    return isinstance(part, type) and issubclass(part, base)


def _failure_location(error: BaseException) -> str:
    """Returns `` (file:line)`` of a module's failure: the broken line, or the user's line that led to the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.name == "<module>":  # the frames before it are importlib's own
            return f" ({frame.filename}:{frame.lineno})"
    return ""
