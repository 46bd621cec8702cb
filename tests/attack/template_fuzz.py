"""Renders mutated and hostile chat templates: ``python tests/attack/template_fuzz.py [--count N] [--seed N]``.

Each must end in token ids or in a UserError of one printable line (exit code 2) within the limit; anything else is a
finding, is printed with its template, and makes the exit code 1.
"""

import argparse
import collections
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from posttrain.models.chat import ChatTemplate
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError

# The limit of the process by the clock, and a little for what comes after; a quiet machine takes a tenth of it.
LIMIT_SECONDS = 40.0

SOUND = [
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}",
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}{% for m in messages if m.role != 'system' %}"
    "{% generation %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endgeneration %}{% endfor %}",
    "{% macro turn(m) %}{{ m.role | upper }}\n{{ m.content.split('</think>')[-1] }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{{ strftime_now('%Y') }}{{ messages | tojson(indent=2) }}",
]

HOSTILE = [
    "{% for i in range(10**12) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 99 + "{% endfor %}",
    "{% set ns = namespace(x='xx') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ ('x' * 10**9) | length }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ range(99999) | join('x' * 99999) }}",
    "{{ lipsum(n=100000) }}",
    "{{ 7 ** 7 ** 7 ** 7 }}",
    "{{ (9 ** 99999) ** 9 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ messages.append(messages) }}",
    "{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'base' %}",
    "{{ raise_exception('\x1b[31mred\nlines') }}",
    "{{ raise_exception('x' * 10**6) }}",
    "{{ undefined.attribute }}",
    "{{ undefined() }}",
    "{{ 1 / 0 }}",
    "{{ 1 + 'a' }}",
    "{{ [][0] }}",
    "{{ {}['a'] }}",
    "{{ 'a' | nosuch }}",
    "{{ '9' * 99999 | int }}",
    "{{ 'ab' | groupby('x') }}",
    "{{ messages | sort(attribute='content.x') }}",
    "{{ '\\ud800' }}",
    "{{ '\\x00' }}",
    "{% break %}",
    "{% if 1 %}" * 500,
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{{ " + "-" * 9000 + "1 }}",
    "{{ " + "[" * 300 + "]" * 300 + " }}",
    "{{ 'constant' }}",
    "",
    "\x00",
    "{%",
    "{{",
    "{# ",
    "{% raw %}",
]

_PIECES = re.compile(r"\{[%{].*?[%}]\}|[^{]+|.", re.DOTALL)

CONVERSATIONS = [
    [{"role": "user", "content": "Where is my card?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ 1 / 0 }}</s>"}],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": ""},
    ],
]


def mutate(draws: random.Random) -> str:
    """Return a sound template with hostile pieces in it, or pieces of it removed, repeated, swapped or cut."""
    pieces = _PIECES.findall(draws.choice(SOUND))
    for _ in range(draws.randint(1, 3)):
        position = draws.randrange(len(pieces) + 1)
        kind = draws.randrange(6)
        if kind == 0:
            pieces.insert(position, draws.choice(HOSTILE))
        elif kind == 1 and pieces:
            del pieces[draws.randrange(len(pieces))]
        elif kind == 2 and pieces:
            pieces.insert(position, draws.choice(pieces))
        elif kind == 3 and pieces:
            other = draws.randrange(len(pieces))
            pieces[position - 1], pieces[other] = pieces[other], pieces[position - 1]
        elif kind == 4:
            text = "".join(pieces)
            pieces = _PIECES.findall(text[: draws.randrange(len(text) + 1)])
        else:
            text = list("".join(pieces))
            for _ in range(draws.randint(1, 4)):
                if text:
                    del text[draws.randrange(len(text))]
                text.insert(draws.randrange(len(text) + 1), draws.choice("{}%|()[]'\"*+-~.,0a \n\x00"))
            pieces = _PIECES.findall("".join(text))
    return "".join(pieces)


def render(template: str) -> str:
    """Encode all conversations, and return the outcome: ``rendered``, ``refused``, or a finding."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    chat = ChatTemplate(tokenizer, frozenset([tokenizer.eos_token_id]))
    for turns in CONVERSATIONS:
        try:
            chat.encode(turns, "At home.")
        except UserError as error:
            if not str(error).isprintable() or len(str(error)) > 1000:
                return f"no printable line: {str(error)[:200]!r}"
            return "refused"
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            return f"{type(error).__name__}: {str(error)[:200]!r}"
    return "rendered"


def main() -> int:
    """Render the templates and print the counts; return 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="mutated templates, after all hostile ones")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws = random.Random(options.seed)
    hostile = HOSTILE if options.count >= 200 else draws.sample(HOSTILE, 4)
    templates = [*hostile, *(SOUND[0] + piece for piece in hostile)]
    templates += SOUND + [mutate(draws) for _ in range(options.count)]
    counts: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="posttrain-attack-") as cache:
        # No earlier check is reused.
        os.environ["XDG_CACHE_HOME"] = str(Path(cache))
        for template in templates:
            start = time.monotonic()
            outcome = render(template)
            took = time.monotonic() - start
            slowest = max(slowest, took)
            if took > LIMIT_SECONDS:
                outcome = f"took {took:.0f} s"
            if outcome not in ("rendered", "refused"):
                print(f"{outcome}\n  {template[:500]!r}")
                outcome = "findings"
            counts[outcome] += 1
    print(f"{len(templates)} templates: {dict(sorted(counts.items()))}, the slowest in {slowest:.1f} s")
    return 1 if counts["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
