"""Checks a chat template of unknown origin before it is used: that it ends, and that prompts and answers survive it."""

import json
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from posttrain.jobs.process import run_command
from posttrain.store.errors import UserError, WorkError, shorten, to_line
from posttrain.store.user_cache import read_user_cache, write_user_cache

_VERSION = 2

_CACHE = "templates"

_PROBE = Path(__file__).with_name("template_probe.py")

# A template renders in a millisecond. Seconds of the processor, as those of the clock depend on what else runs.
_CPU_SECONDS, _CLOCK_SECONDS = 3, 30
_BYTES = 2**29
_CHARACTERS = 500_000
_MAX_TEMPLATE = 1_000_000

_FIX = "correct the model's chat_template"

# Plain words: a template may trim, and may treat marks of reasoning in its own way.
_QUESTIONS = ("Where is the station?", "When does it open?")
_ANSWERS = ("Behind the park", "At nine today")


@dataclass(frozen=True)
class TemplateAbilities:
    """The parts of a conversation that a template shows the model.

    Args:
        system: whether it shows the system message, or refuses conversations that have one.
        earlier_turns: whether it shows the turns before the last, or refuses such conversations.
        tool: whether it shows what a tool returned, or refuses such conversations.
    """

    system: bool = True
    earlier_turns: bool = True
    tool: bool = True


@lru_cache(maxsize=64)
def template_abilities(template: str, variables: str) -> TemplateAbilities:
    """Renders a few conversations in a process with limits on time, memory and size, once per template and user.

    Args:
        template: a Jinja template.
        variables: JSON of the variables that it is rendered with beside the messages, such as ``bos_token``.

    Raises:
        UserError: it fails, does not end, shows the model the same for two different prompts, or loses the answer.
        WorkError: the process cannot be started.
    """
    if len(template) > _MAX_TEMPLATE:
        raise _refusal(f"has {len(template):,} characters")
    key = json.dumps([_VERSION, template, variables])
    if (abilities := _read_abilities(key)) is None:
        abilities = _judge(_render(template, variables))
        write_user_cache(_CACHE, key, asdict(abilities))
    return abilities


def message_line(message: object) -> str:
    """Returns a template's message in one short line: it may hold anything, and megabytes of it."""
    return shorten(to_line(str(message)[:2000]), 300)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _conversations() -> dict[str, list[dict[str, str]]]:
    """Returns the probe's conversations, in pairs that differ in one turn."""
    user, assistant = [_turn("user", text) for text in _QUESTIONS], [_turn("assistant", text) for text in _ANSWERS]
    system = [_turn("system", text) for text in ("Be brief.", "Answer in French.")]
    return {
        "prompt": [user[0]],
        "other prompt": [user[1]],
        "answer": [user[0], assistant[0]],
        "other answer": [user[0], assistant[1]],
        "system": [system[0], user[0]],
        "other system": [system[1], user[0]],
        "earlier": [user[0], assistant[0], user[0]],
        "other earlier": [user[1], assistant[0], user[0]],
        "earlier answer": [user[0], assistant[0], user[0]],
        "other earlier answer": [user[0], assistant[1], user[0]],
        "tool": [user[0], _turn("tool", _ANSWERS[0])],
        "other tool": [user[0], _turn("tool", _ANSWERS[1])],
    }


def _render(template: str, variables: str) -> dict[str, dict[str, str]]:
    conversations = _conversations()
    request = {
        "template": template,
        "variables": json.loads(variables),
        "conversations": [
            {"messages": turns, "add_generation_prompt": turns[-1]["role"] != "assistant"}
            for turns in conversations.values()
        ],
        "characters": _CHARACTERS,
    }
    # Not with the probe's folder among those of modules: files beside it could have the names of libraries.
    command = [sys.executable, "-P", str(_PROBE)]
    done = run_command(
        command,
        input=json.dumps(request).encode(),
        seconds=_CLOCK_SECONDS,
        cpu_seconds=_CPU_SECONDS,
        memory_bytes=_BYTES,
    )
    if done.code is None:
        raise _refusal(f"does not end within {_CLOCK_SECONDS} seconds")
    try:
        results = json.loads(done.output)
    except ValueError:
        message = message_line(done.last_error)
        # Ended by a signal: the limit on its time, or a stack that overflowed in native code.
        if done.code < 0 or "MemoryError" in message:
            what = f"takes more than {_CPU_SECONDS} seconds or {_BYTES >> 20} MiB for a short conversation"
            raise _refusal(what) from None
        raise WorkError(f"the process that checks chat templates failed ({done.code}): {message}") from None
    return dict(zip(conversations, results, strict=True))


def _judge(results: dict[str, dict[str, str]]) -> TemplateAbilities:
    for name in ("prompt", "other prompt", "answer", "other answer"):
        if error := results[name].get("error"):
            raise _refusal(f"cannot be rendered: {message_line(error)}")
    if results["prompt"] == results["other prompt"]:
        raise _refusal("shows the model the same text for two different prompts")
    for name, answer in zip(("answer", "other answer"), _ANSWERS, strict=True):
        if answer not in results[name]["text"]:
            raise _refusal("loses the assistant's answer")

    def shows(name: str) -> bool:
        # Refusing a conversation is the template's right: users are told so.
        return "error" in results[name] or results[name] != results[f"other {name}"]

    return TemplateAbilities(
        system=shows("system"), earlier_turns=shows("earlier") and shows("earlier answer"), tool=shows("tool")
    )


def _refusal(what: str) -> UserError:
    return UserError(f"the model's chat template {what}", where="model", fix=_FIX)


def _read_abilities(key: str) -> TemplateAbilities | None:
    """Returns the result of an earlier check; None if there was none, or its file is damaged."""
    values = read_user_cache(_CACHE, key)
    try:
        return TemplateAbilities(bool(values["system"]), bool(values["earlier_turns"]), bool(values["tool"]))
    except (KeyError, TypeError):
        return None
