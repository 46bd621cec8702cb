"""A chat template of unknown origin is rendered in a process with limits first, and refused if it loses a part."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.models import template_check
from posttrain.models.chat import ChatTemplate
from posttrain.models.task import Turns
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError, WorkError

SOUND = "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ '<|end|>' }}{% endfor %}"
USER: Turns = [{"role": "user", "content": "Hello"}]
SYSTEM: Turns = [{"role": "system", "content": "Be brief."}, *USER]
CONVERSATION: Turns = [*USER, {"role": "assistant", "content": "Hi"}, *USER]

MakeChat = Callable[[Any], ChatTemplate]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache folder of its own, as for a new user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    template_check.template_abilities.cache_clear()
    return tmp_path / "posttrain" / "templates"


@pytest.fixture
def make_chat() -> MakeChat:
    def make(template: Any) -> ChatTemplate:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        return ChatTemplate(tokenizer, frozenset([tokenizer.eos_token_id]))

    return make


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'Hello' }}", "shows the model the same text for two different prompts"),
        ("{{ messages | length }}", "shows the model the same text for two different prompts"),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", "loses the assistant's answer"),
        ("{% for m in messages %}{{ m.content[:6] }}{% endfor %}", "loses the assistant's answer"),
        ("{% for m in messages", "cannot be rendered: TemplateSyntaxError"),
        (SOUND + "{{ missing.name }}", "cannot be rendered: UndefinedError: 'missing' is undefined"),
        (SOUND + "{{ messages.__class__.__mro__ }}", "cannot be rendered: SecurityError"),
        (SOUND + "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot be rendered: RecursionError"),
        (SOUND + "{{ 1 + 'a' }}", "cannot be rendered: TypeError"),
        (SOUND + "{{ 1 / 0 }}", "cannot be rendered: ZeroDivisionError"),
        (SOUND + "{% include '/etc/passwd' %}", "cannot be rendered: TypeError: no loader"),
        (SOUND + "{% for i in range(10 ** 12) %}{% endfor %}", "cannot be rendered: OverflowError: Range too big"),
        (SOUND + "{{ 'x' * 10 ** 10 }}", "more memory than the limit"),
        ("{% for i in range(99999) %}0123456789{% endfor %}", "more than 500,000 characters for a short conversation"),
        ("x" * 1_000_001, "has 1,000,001 characters"),
        (SOUND + "{{ raise_exception('\x1b[31mred\n\nlines') }}", "TemplateError: \ufffd[31mred lines"),
        (SOUND + "{{ '\\ud800' }}", "writes text that is not Unicode"),
        ({"tool_use": SOUND}, "cannot be used"),
        (7, "cannot be used"),
    ],
)
def test_a_template_that_does_not_work_is_refused_in_one_line(make_chat: MakeChat, template: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_chat(template).encode(USER, "Hi")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.slow
def test_a_template_that_does_not_end_is_ended(make_chat: MakeChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check, "_CPU_SECONDS", 1)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    start = time.monotonic()
    with pytest.raises(UserError, match="takes more than 1 seconds or 512 MiB for a short conversation"):
        make_chat(SOUND + endless).encode(USER, "Hi")
    assert time.monotonic() - start < template_check._CLOCK_SECONDS


def test_a_slow_processor_is_limited_by_the_clock(make_chat: MakeChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check, "_CLOCK_SECONDS", 0.01)
    with pytest.raises(UserError, match="does not end within"):
        make_chat(SOUND).encode(USER, "Hi")


def test_a_process_that_cannot_be_started_is_no_fault_of_the_template(
    make_chat: MakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_check, "_PROBE", tmp_path / "missing.py")
    with pytest.raises(WorkError, match="the process that checks chat templates failed"):
        make_chat(SOUND).encode(USER, "Hi")


def test_only_conversations_that_the_template_cuts_are_refused(make_chat: MakeChat) -> None:
    no_system = make_chat("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    assert no_system.encode(CONVERSATION, "Hi").ids
    with pytest.raises(UserError, match=r"drops system messages; .*task\.system"):
        no_system.encode(SYSTEM, "Hi")
    last_turns = make_chat("{% for m in messages[-2:] %}{{ m.content }}{% endfor %}")
    assert last_turns.encode(USER, "Hi").ids
    with pytest.raises(UserError, match="drops all turns but the last"):
        last_turns.encode(CONVERSATION, "Hi")
    # The turns of users alone, and the last answer.
    no_answers = make_chat(
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match="drops all turns but the last"):
        no_answers.encode(CONVERSATION, "Hi")
    no_tool = make_chat("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}")
    assert no_tool.encode(CONVERSATION, "Hi").ids
    with pytest.raises(UserError, match="drops the turns of tools"):
        no_tool.encode([*USER, {"role": "tool", "content": "7 degrees"}], "Hi")


def test_a_sound_template_is_checked_once_per_user(
    make_chat: MakeChat, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_chat(SOUND).encode(SYSTEM, "Hi")
    (marker,) = cache.iterdir()
    template_check.template_abilities.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(template_check, "_PROBE", "not run")
        assert make_chat(SOUND).encode(SYSTEM, "Hi") == expected
    marker.write_bytes(b"damaged")
    template_check.template_abilities.cache_clear()
    assert make_chat(SOUND).encode(SYSTEM, "Hi") == expected
    assert marker.read_bytes() != b"damaged"


def test_a_refused_template_is_not_remembered(make_chat: MakeChat, cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="two different prompts"):
            make_chat("{{ 'Hello' }}").encode(USER, "Hi")
    assert not cache.exists()


def test_an_error_after_the_check_is_one_line(make_chat: MakeChat) -> None:
    """What the check's conversations do not show: here, the fifth turn."""
    chat = make_chat(SOUND + "{% if messages | length > 4 %}{{ missing.name }}{% endif %}")
    assert chat.encode(CONVERSATION, "Hi").ids
    with pytest.raises(UserError, match=r"fails with UndefinedError on the turns \(user, assistant, .*'missing'"):
        chat.prompt_ids([*CONVERSATION, *CONVERSATION[1:]])
