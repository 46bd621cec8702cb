"""Feeds mutated configs to ``posttrain config check``: ``python tests/attack/config_fuzz.py --count 5000 [--seed 0]``.

Each must end within two seconds, with exit code 0 or with 2 and a line for each mistake. Prints how often each outcome
and mutation came up, and each failure with its seed.
"""

import argparse
import contextlib
import io
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from posttrain.cli.main import main

SECONDS = 2.0

# Written out, so that the values reach sections that a short config leaves alone.
BASE: dict[str, Any] = {
    "model": "tiny",
    "rounds": 2,
    "seed": 17,
    "task": {"labels": ["card", "cash", "loan", "rate"]},
    "data": {
        "pool": ["pool.csv"],
        "test": ["test.csv"],
        "columns": {"prompt": "text", "completion": "label"},
        "steps": ["exact", {"minhash": {"threshold": 0.8}}, {"decontaminate": {"ngram": 13}}],
    },
    "select": {"strategy": "auto", "pool_sample": 100},
    "label": {"annotator": "oracle", "file": "answers.csv", "per_round": 12},
    "train": {"epochs": 2, "learning_rate": 4.0e-3, "optimizer": {"name": "adamw"}},
    "evaluate": {"latency": {"prompts": 0}, "bootstrap": {"resamples": 200}, "suites": {"test": {}}},
    "gate": {"deploy": ["accuracy >= 0"], "rollback": ["accuracy < 0.1"]},
    "triggers": {"any": ["new_records > 3"]},
    "deploy": {"command": "true", "timeout": 60},
    "store": {"artifacts": None},
}

VALUES: list[Any] = [
    *(None, True, False, "", " ", [], {}, [[]], {"a": {}}, 0, -1, 1, 0.0, -0.0, 1e308, 5e-324, 10**30, -(10**400)),
    *(float("inf"), float("-inf"), float("nan"), 2**31, 2**63, 2**64, "1e999", "nan", "9" * 5000, "1:30", "0x1F"),
    *("yes", "~", "null", "../../../etc/passwd", "/dev/zero", "/dev/stdin", "x" * 300, "x" * 100_000, "a/" * 3000),
    *("pipe", "loop", "folder", "~nobody-here/x", "s3://", "s3://b/k::zip://x", "file:///etc/passwd", "http://[::1"),
    *("\u202e", "é" * 50, "\U0001f600", "\x1b[31m", "a\nb\nc", "{prompt}", "${HOME}", "$(true)", "module:Name"),
    *("a" + " + a" * 2000 + " > 0", "(" * 900 + "a" + ")" * 900, "not " * 600 + "a", "-" * 3000 + "a", "a > "),
    *("1" * 400 + " > a", "a" * 1_000_000, "accuracy > 1e999", [1] * 1000, {str(key): key for key in range(500)}),
]

# What no YAML library writes: whole files, or text to put into one.
TEXTS: list[bytes] = [
    *(b"", b"\n", b"---\n", b"--- a\n--- b\n", b"\xff\xfe", b"\xef\xbb\xbfmodel: tiny\n", b"\x00", b"model: \x00\n"),
    *(b'model: "\\0"\n', b'model: "\\ud800"\n', b'"\\ud800": 1\n', b"model: !!python/object/apply:os.system [x]\n"),
    *(
        b"model: !!binary aGk=\n",
        b"? [a]\n: 1\n",
        b"? {a: b}\n: 1\n",
        b"<<: 1\n",
        b"<<: [1]\n",
        b"a: *b\n",
        b"%YAML 9.9\n",
    ),
    *(
        b"a: &a [*a]\n",
        b"a: &a {b: *a}\n",
        b"seed: 1:30\n",
        b"seed: 010\n",
        b"seed: 2026-02-30\n",
        b"seed: 2026-01-01\n",
    ),
    *(
        b"seed: " + b"9" * 5000 + b"\n",
        b"seed: 0b2\n",
        b"seed: 0x\n",
        b"seed: 1__0\n",
        b"seed: .nan\n",
        b"seed: -.inf\n",
    ),
    *(b"[" * 5000, b"{a: " * 3000, b"- " * 3000, b"a:\n" + b" - \n" * 5000, b"\t a: 1\n", b"a: |\n", b"a: 'b\n"),
    b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)),
    b"a0: &a0 {k: v}\n"
    + b"".join(b"a%d: &a%d {<<: [%s], k%d: v}\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9), n) for n in range(1, 9)),
    *(
        b"model: tiny\nmodel: tiny\n",
        b"x: " + b"y" * 1_200_000,
        b"".join(b"k%d: 1\n" % number for number in range(2000)),
    ),
]


class Case(NamedTuple):
    """A mutated config; ``kind`` names the mutation."""

    kind: str
    content: bytes


def _paths(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Lists the paths to all values, those of sections too."""
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [*([path] if path else []), *(below for key, value in inner for below in _paths(value, (*path, key)))]


def _copy(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _copy(value) for key, value in values.items()}
    return [_copy(value) for value in values] if isinstance(values, list) else values


def _parent(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        values = values[key]
    return values


def _change(draw: random.Random, edit: Callable[[Any, Any], None], times: int = 1) -> bytes:
    config = _copy(BASE)
    for _ in range(times):
        path = draw.choice(_paths(config))
        edit(_parent(config, path), path[-1])
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")


def _replace(draw: random.Random) -> bytes:
    def edit(parent: Any, key: Any) -> None:
        parent[key] = _copy(draw.choice(VALUES))

    return _change(draw, edit, draw.choice([1, 1, 1, 3]))


def _remove(draw: random.Random) -> bytes:
    def edit(parent: Any, key: Any) -> None:
        del parent[key]

    return _change(draw, edit)


def _add_key(draw: random.Random) -> bytes:
    def edit(parent: Any, key: Any) -> None:
        if isinstance(parent, dict):
            name = draw.choice(["seed", "epoch", "x" * 1_000, "a.b", "é", "", "a\nb", "\x1b[2J", "key", "0"])
            parent[name] = _copy(draw.choice(VALUES))

    return _change(draw, edit)


def _misspell(draw: random.Random) -> bytes:
    def edit(parent: Any, key: Any) -> None:
        if isinstance(key, str):
            at = draw.randrange(len(key) + 1)
            parent[key[:at] + draw.choice("aeé_. 0") + key[at:]] = parent.pop(key)

    return _change(draw, edit)


def _wrap(draw: random.Random) -> bytes:
    depth = draw.choice([1, 2, 10, 45, 60, 300])

    def edit(parent: Any, key: Any) -> None:
        for _ in range(depth):
            parent[key] = [parent[key]] if draw.random() < 0.5 else {"a": parent[key]}

    # safe_dump recurses itself, so that deeper nesting is in TEXTS.
    return _change(draw, edit)


def _bytes(draw: random.Random) -> bytes:
    content = bytearray(_change(draw, lambda parent, key: None))
    for _ in range(draw.choice([1, 2, 8])):
        at = draw.randrange(len(content))
        content[at : at + draw.randrange(3)] = draw.choice(
            [
                b"\x00",
                b"\xff",
                b":",
                b"&a ",
                b"*a",
                b"- ",
                b"\n",
                b"\t",
                b"'",
                b'"',
                b"{",
                b"[",
                b"#",
                b"!",
                b"|",
                b"%",
                b"\x85",
            ]
        )
    return bytes(content)


def _text(draw: random.Random) -> bytes:
    text = draw.choice(TEXTS)
    base = _change(draw, lambda parent, key: None)
    return draw.choice([text, base + text, text + base])


def _raw_value(draw: random.Random) -> bytes:
    """Puts text that is not a quoted value in the place of one."""
    lines = _change(draw, lambda parent, key: None).split(b"\n")
    at = draw.choice([number for number, line in enumerate(lines) if b":" in line])
    value = draw.choice(
        [b"1:30", b"yes", b"on", b"010", b"1_000", b".inf", b"-.nan", b"1e5", b"2026-01-01", b"0o7", b"~"]
    )
    lines[at] = lines[at].partition(b":")[0] + b": " + value
    return b"\n".join(lines)


MUTATIONS: dict[str, Callable[[random.Random], bytes]] = {
    "replaced value": _replace,
    "removed key": _remove,
    "added key": _add_key,
    "misspelled key": _misspell,
    "wrapped value": _wrap,
    "damaged bytes": _bytes,
    "hostile text": _text,
    "unquoted value": _raw_value,
}


def case(seed: int, number: int) -> Case:
    """Returns the mutated config with a number."""
    draw = random.Random(f"{seed}/{number}")
    kind = list(MUTATIONS)[number % len(MUTATIONS)]
    return Case(kind, MUTATIONS[kind](draw))


def prepare(root: Path) -> None:
    """Writes the files that the configs name, and some that no config should."""
    rows = [
        f"the {label} is {word},{label}" for word in ("late", "lost", "new", "odd") for label in BASE["task"]["labels"]
    ]
    files = {"pool.csv": rows[:8], "test.csv": rows[8:], "answers.csv": rows}
    for name, rows in files.items():
        (root / name).write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to("loop")


def outcome(root: Path, content: bytes) -> tuple[int, str]:
    """Checks one config; returns the exit code, and the problem of its outcome, "" if there is none."""
    (root / "posttrain.yaml").write_bytes(content)
    output, errors, start = io.StringIO(), io.StringIO(), time.monotonic()
    code: Any = None
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            main(["config", "check", "-w", str(root)])
    except SystemExit as stop:
        code = stop.code
    except BaseException:  # noqa: BLE001 - any other exception is what this program is looking for
        return -1, traceback.format_exc()
    lines = errors.getvalue().splitlines()
    if (seconds := time.monotonic() - start) > SECONDS:
        return code, f"took {seconds:.1f} seconds"
    if code == 0 and not lines:
        return code, ""
    # A line for each mistake: `config check` names all that the files have.
    if code != 2 or not lines or not all(line.isprintable() and line.startswith("posttrain: ") for line in lines):
        return code, f"exit {code}: {errors.getvalue()[:1000]}"
    return code, ""


def attack(root: Path, count: int, seed: int = 0) -> tuple[Counter[tuple[str, int]], list[str]]:
    """Checks ``count`` configs; returns how often each mutation had each exit code, and the failures."""
    prepare(root)
    counts: Counter[tuple[str, int]] = Counter()
    failures = []
    for number in range(count):
        kind, content = case(seed, number)
        code, problem = outcome(root, content)
        counts[kind, code] += 1
        if problem:
            failures.append(f"seed {seed} number {number} ({kind}): {problem}")
    return counts, failures


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="posttrain-fuzz-") as folder:
        counts, failures = attack(Path(folder), arguments.count, arguments.seed)
    for (kind, code), count in sorted(counts.items()):
        print(f"{kind:<16} exit {code}: {count:,}")
    print(f"{arguments.count:,} configs, {len(failures):,} failures", *failures[:20], sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run())
