"""Groups of verbs whose modules are imported when they are called: a list of verbs needs nothing of what they do."""

from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group


class LazyVerb(NamedTuple):
    """Where a verb lives, and its line in the list of verbs.

    Args:
        module: has ``add_to(app)``, which registers the verb.
        help: the first line of what the verb's own ``--help`` says.
    """

    module: str
    help: str


class LazyGroup(TyperGroup):
    """A group of ``verbs``, by their names and in their order."""

    verbs: ClassVar[dict[str, LazyVerb]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, verb in self.verbs.items():
            self.add_command(TyperCommand(name, help=verb.help))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself, where its name is known, and the arguments behind it."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, self.load(listed.name) if listed and listed.name else listed, rest

    def load(self, name: str) -> Any:
        """The command of a verb, with its module."""
        app = typer.Typer()
        import_module(self.verbs[name].module).add_to(app)
        return get_group(app).commands[name]
