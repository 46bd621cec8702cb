"""Reads YAML files that users wrote: strict about keys, bounded in size and depth, and with numbers as they look."""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from posttrain.store.errors import UserError, shorten, to_line
from posttrain.store.paths import check_path

MAX_BYTES = 1_000_000
"""Bytes of the longest file; labels and records belong in files of their own."""

MAX_DEPTH = 50
"""Lists and mappings inside each other, at most."""

MAX_NODES = 200_000
"""Values in the whole file, at most, where each alias counts as a copy of what it stands for."""

_FIX_SIZE = "put labels and records into files of their own, and name those"


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file's mapping; a duplicate key is an error, where YAML would take the last.

    Raises:
        UserError: the file cannot be read, is broken, too large or too deep, or holds no mapping; with the line, if
            there is one.
    """
    check_path(path, path.name)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path.name) from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"is larger than {MAX_BYTES:,} bytes", where=path.name, fix=_FIX_SIZE)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("is not UTF-8 text", where=path.name) from None
    values = parse_yaml(text, path.name, lines=True)
    if not isinstance(values, dict):
        raise UserError("holds no config: expected `key: value` lines", where=path.name)
    return values


def parse_yaml(text: str, where: str, *, lines: bool = False) -> Any:
    """Parses YAML text.

    Args:
        where: The file or option that the text comes from, named in errors.
        lines: True to add the line to ``where``.

    Raises:
        UserError: the text is broken, or too deep.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if lines and error.problem_mark else ""
        problem, where = str(error.problem or error.context), f"{where}{line}"
    # A ValueError is a number or a date that Python does not know, such as 2026-02-30.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        problem = str(error)
    raise UserError(f"broken YAML: {shorten(to_line(problem), 200)}", where=where)


def line_of(path: Path, key: str) -> int | None:
    """Returns the line on which a YAML file sets a dotted key; None if it does not, or cannot be read."""
    try:
        check_path(path)
        node = yaml.compose(path.read_text(encoding="utf-8"), _StrictLoader)
    except (UserError, OSError, ValueError, yaml.YAMLError):
        return None
    line = None
    names = key.split(".")
    while names:
        items: list[tuple[Any, Any]] = []
        length = 1
        if isinstance(node, yaml.MappingNode):
            # A name may have dots itself, as those of a search space.
            for length in range(len(names), 0, -1):
                if items := [item for item in node.value if item[0].value == ".".join(names[:length])]:
                    break
        elif isinstance(node, yaml.SequenceNode) and names[0].isdigit() and len(names[0]) < 10:
            items = [(item, item) for item in node.value][int(names[0]) :]
        if not items:
            return None
        names = names[length:]
        named, node = items[0]
        line = named.start_mark.line + 1
    return line


_INTEGER, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _StrictLoader(yaml.SafeLoader):
    """Rejects keys that stand twice or are not words, text that no file can hold, and files that are bombs."""

    # Without YAML 1.1's numbers to the base 60, where `1:30` is 90, and octal ones, where `010` is 8.
    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {  # type: ignore[misc]  # the stubs have it by instance
        first: [
            resolver
            for resolver in resolvers
            if resolver[0] not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        # Before the node, as the composer recurses: Python's own limit depends on the caller's depth.
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before, anchor = self._nodes, getattr(event, "anchor", None)
        is_alias = isinstance(event, yaml.AliasEvent)
        # The size of an alias that stands inside its own anchor is not known yet.
        if is_alias and anchor in self.anchors and anchor not in self._sizes:
            raise yaml.composer.ComposerError(None, None, f"`*{anchor}` refers to itself", event.start_mark)
        self._nodes += self._sizes.get(str(anchor), 1) if is_alias else 1
        if self._nodes > MAX_NODES:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_NODES:,} values", event.start_mark)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None and not is_alias:
            self._sizes[anchor] = self._nodes - before
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        # Escapes such as "\0" and "\ud800" make them; no path, database or file could hold them.
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            raise yaml.constructor.ConstructorError(None, None, "a character that is not text", node.start_mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                name = shorten(to_line(key.value))
                raise yaml.constructor.ConstructorError(None, None, f"`{name}` is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    _INTEGER, re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_StrictLoader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"""[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+][0-9]+)?$
        |[-+]?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?$
        |[-+]?\.(?:inf|Inf|INF)$
        |\.(?:nan|NaN|NAN)$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)
