"""Command groups that import a verb's module only when the verb is called, so that help and completion stay fast."""

from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from posttrain.store.errors import UserError, suggest
from posttrain.store.paths import check_path


class LazyVerb(NamedTuple):
    """Names the function or group behind a verb, and its line in the list of verbs.

    Args:
        target: ``package.module:name`` of a function, or of a `typer.Typer` with verbs of its own.
        help: first line of the verb's own ``--help``.
    """

    target: str
    help: str


class LazyGroup(TyperGroup):
    """Lists ``verbs`` in their order, and imports the one that is called.

    Arguments that begin with no verb are those of ``default``, where a group has one. ``elsewhere`` says what to do in
    place of verbs that other tools have.
    """

    verbs: ClassVar[dict[str, LazyVerb]] = {}
    elsewhere: ClassVar[dict[str, str]] = {}
    default: ClassVar[str | None] = None

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Placeholders with a line of help: to list the verbs, none of their modules is imported.
        for name, verb in self.verbs.items():
            self.add_command(TyperCommand(name, help=verb.help))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the default verb before a call without a verb."""
        if self.default and args and args[0] not in (*self.verbs, "-h", "--help") and not self._is_misspelt(args[0]):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def _is_misspelt(self, argument: str) -> bool:
        """Returns whether an argument is nearly a verb, and no file; the base class then names the verb."""
        return suggest(argument, self.verbs, listed=False) is not None and not Path(argument).exists()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the called verb's name, its imported command and the arguments after it."""
        if args and args[0] in self.elsewhere:
            raise UserError(f"`{args[0]}` is not a verb", fix=self.elsewhere[args[0]])
        # The base class reports unknown names with the nearest known one: the placeholders are enough for that.
        name, listed, rest = super().resolve_command(ctx, args)
        return name, self.load(listed.name) if listed and listed.name else listed, rest

    def load(self, name: str) -> Any:
        """Import a verb and return its command."""
        module, _, attribute = self.verbs[name].target.partition(":")
        target = getattr(import_module(module), attribute)
        app = typer.Typer()
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name)
        else:
            app.command(name)(target)
        return _with_checked_paths(get_group(app).commands[name])


def _with_checked_paths(command: Any) -> Any:
    """Has every path that a verb takes checked before the verb begins: a pipe would hang it, hours into its work."""
    for inner in getattr(command, "commands", {}).values():
        _with_checked_paths(inner)
    verb = command.callback
    if verb is not None:

        @wraps(verb)
        def checked(*arguments: Any, **options: Any) -> Any:
            for value in options.values():
                for path in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(path, Path):
                        check_path(path)
            return verb(*arguments, **options)

        command.callback = checked
    return command
