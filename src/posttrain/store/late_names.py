"""Names of a package whose modules are loaded when somebody asks for them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
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
