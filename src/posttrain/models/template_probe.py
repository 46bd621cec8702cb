"""Renders a chat template of unknown origin, as a process of its own that can be ended.

Reads JSON from standard input: ``template``, ``variables`` (those of every rendering), ``conversations`` (each with
``messages`` and ``add_generation_prompt``) and ``characters`` (a limit). Writes a list of ``{"text": ...}`` or
``{"error": ...}``. Run by its path: it imports Jinja and no package of this program, so that it
starts in a tenth of a second.
"""

import json
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """Accepts ``{% generation %}``, which transformers has added, and renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads a plain set

    def parse(self, parser: Any) -> Any:
        """Returns the statements up to ``{% endgeneration %}``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def environment() -> ImmutableSandboxedEnvironment:
    """Returns an environment like that of ``transformers.utils.chat_template_utils``."""
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    jinja.filters["tojson"] = _to_json
    jinja.globals["raise_exception"] = _raise_exception
    jinja.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return jinja


def render(template: Any, variables: dict[str, Any], conversation: dict[str, Any], characters: int) -> dict[str, str]:
    """Renders one conversation, up to a number of characters."""
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(**variables, **conversation, tools=[], documents=None):
            pieces.append(piece)
            length += len(piece)
            if length > characters:
                return {"error": f"more than {characters:,} characters for a short conversation"}
    except MemoryError:
        return {"error": "more memory than the limit for a short conversation"}
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        return {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
    return {"text": "".join(pieces)}


def main() -> None:
    """Renders all conversations."""
    request = json.load(sys.stdin)
    try:
        template = environment().from_string(request["template"])
    except Exception as error:  # noqa: BLE001 - the parser raises errors of Jinja, of Python and of the tokenizer
        results = [{"error": f"{type(error).__name__}: {str(error)[:1000]}"}] * len(request["conversations"])
    else:
        results = [
            render(template, request["variables"], conversation, request["characters"])
            for conversation in request["conversations"]
        ]
    json.dump(results, sys.stdout)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


if __name__ == "__main__":
    main()
