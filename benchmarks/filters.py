"""Filters for web text: the decisions and the speed of ours and of datatrove's.

    python benchmarks/filters.py --data DIR --peer-python OTHER/bin/python [--records 4000] [--repeats 3]

DIR holds ``gsm8k_{train,test}.jsonl``, ``banking77_{train,test}.csv`` and ``hh_harmless_test.jsonl.gz``. The peer has a
virtual environment of its own (``pip install datatrove==0.10.1 spacy nltk regex xxhash ftfy`` with the constraints of
this project).

Half of the pages are real texts: passages of GSM8K, dialogues of HH, lists of messages of Banking77. The others are
such pages with a flaw planted that one of the rules is about: lines, paragraphs or stretches of words that recur, lines
without an end, bullets, ellipses, hash signs, numbers, brackets, menus. Both sides use their defaults on one processor
core; the peer once with the words of its tokenizer and once with those that whitespace parts, which are ours, so that
it shows what comes of the words and what of the rules. A repeat runs all contenders one after the other; times are
medians, in processor time. The last row is all four filters on each page, where the peer splits a page into words once.
"""

import argparse
import csv
import gzip
import json
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.records.identity import assign_ids
from posttrain.data.records.schema import RECORD, records
from posttrain.data.steps.registry import STEPS

FILTERS = ("gopher", "gopher_repetition", "c4", "fineweb")
_PEER = Path(__file__).with_name("peers") / "datatrove_filters.py"

Found = dict[str, dict[str, Any]]


def passages(folder: Path) -> list[str]:
    """Real pages of about 300 to 3,000 characters."""
    problems, messages, dialogues = [], [], []
    for side in ("train", "test"):
        for line in (folder / f"gsm8k_{side}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            problems.append(row["question"] + "\n" + row["answer"].split("\n####")[0])
        with (folder / f"banking77_{side}.csv").open(encoding="utf-8", newline="") as file:
            messages += [row["text"].strip() for row in csv.DictReader(file)]
    with gzip.open(folder / "hh_harmless_test.jsonl.gz", "rt", encoding="utf-8") as file:
        dialogues = [json.loads(line)["chosen"].strip() for line in file]
    in_threes = ["\n\n".join(problems[start : start + 3]) for start in range(0, len(problems), 3)]
    in_tens = ["\n".join(messages[start : start + 10]) for start in range(0, len(messages), 10)]
    return in_threes + in_tens + dialogues


def flawed(page: str, kind: int, share: float) -> str:
    """A page with one flaw in a share of it."""
    lines, words = page.split("\n"), page.split()
    some = max(1, round(share * len(lines)))
    flaws: list[Callable[[], str]] = [
        lambda: "\n".join(lines + lines[:1] * some),
        lambda: "\n\n".join([page, *["\n".join(lines[:2])] * some]),
        lambda: " ".join(words + words[: max(1, round(share * len(words)))]),
        lambda: "\n".join(line.rstrip(".?!") if number < some else line for number, line in enumerate(lines)),
        lambda: "\n".join(f"- {line}" if number < some else line for number, line in enumerate(lines)),
        lambda: "\n".join(f"{line}..." if number < some else line for number, line in enumerate(lines)),
        lambda: " ".join(f"#{word}" if number < share * len(words) / 3 else word for number, word in enumerate(words)),
        lambda: " ".join(str(number) if number < share * len(words) else word for number, word in enumerate(words)),
        lambda: "\n".join([*lines, "if (page) { show(); }"]),
        lambda: "\n".join(["Home", "About us", "Contact", *lines[:some], "Terms of use", "Read more"]),
    ]
    return flaws[kind % len(flaws)]()


def pages(folder: Path, count: int, seed: int = 0) -> list[str]:
    """``count`` pages, every other one with a flaw."""
    draws = np.random.default_rng(seed)
    real = passages(folder)
    rows = draws.integers(len(real), size=count).tolist()
    shares = draws.random(count).tolist()
    return [
        flawed(real[row], number // 2, share) if number % 2 else real[row]
        for number, (row, share) in enumerate(zip(rows, shares, strict=True))
    ]


def ours(texts: Sequence[str]) -> Found:
    """What our steps decide, in the form of what the peer prints."""
    blank = {**dict.fromkeys(RECORD.names), "source": "pages", "meta": "{}"}
    table = assign_ids(records([{**blank, "text": text, "line": number} for number, text in enumerate(texts)]))
    found: Found = {}
    for name in FILTERS:
        step = STEPS[name]()
        start = time.process_time()
        kept, rejected, *_ = step.apply(table)  # type: ignore[attr-defined]
        seconds = time.process_time() - start
        why = dict(zip(rejected["line"].to_pylist(), rejected["reason"].to_pylist(), strict=True))
        left = dict(zip(kept["line"].to_pylist(), kept["text"].to_pylist(), strict=True))
        rows = range(len(texts))
        found[name] = {
            "seconds": seconds,
            "reasons": [why.get(row) for row in rows],
            "texts": [left.get(row) for row in rows],
        }
    found["all"] = {"seconds": sum(one["seconds"] for one in found.values())}
    return found


def peer(python: str, texts: str, words: str) -> Found:
    run = subprocess.run([python, str(_PEER), texts, words], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"the peer failed:\n{run.stderr}")
    return dict(json.loads(run.stdout.splitlines()[-1]))


def agreement(one: Sequence[str | None], other: Sequence[str | None]) -> tuple[float, Counter[str]]:
    """Share of equal decisions, and how often which pair of reasons stands where they differ."""
    pairs = list(zip(one, other, strict=True))
    differ = Counter(f"{a or 'stays'} / {b or 'stays'}" for a, b in pairs if (a is None) != (b is None))
    return 1 - differ.total() / len(pairs), differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    texts = pages(arguments.data, arguments.records)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    last: dict[str, Found] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(texts, file)
        file.flush()
        for _ in range(arguments.repeats):
            last = {"ours": ours(texts)}
            for words in ("own", "spaces"):
                last[words] = peer(arguments.peer_python, file.name, words)
            for who, found in last.items():
                for name, one in found.items():
                    seconds[who, name].append(one["seconds"])
    speed = {key: len(texts) / statistics.median(values) for key, values in seconds.items()}

    print(f"{len(texts):,} pages of {statistics.mean(map(len, texts)):,.0f} characters; {arguments.repeats} repeats\n")
    print("| filter | ours, pages/s | datatrove, pages/s | ratio | with words parted by spaces | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in (*FILTERS, "all"):
        mine, own, spaces = (speed[who, name] for who in ("ours", "own", "spaces"))
        print(f"| {name} | {mine:,.0f} | {own:,.0f} | {mine / own:.1f} | {spaces:,.0f} | {mine / spaces:.1f} |")
    print("\n| filter | ours rejects | datatrove rejects | equal decisions | equal with words parted by spaces |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in FILTERS:
        mine, own, spaces = (last[who][name]["reasons"] for who in ("ours", "own", "spaces"))
        gone = [sum(one is not None for one in reasons) / len(texts) for reasons in (mine, own)]
        equal = [agreement(mine, reasons)[0] for reasons in (own, spaces)]
        print(f"| {name} | {gone[0]:.1%} | {gone[1]:.1%} | {equal[0]:.2%} | {equal[1]:.2%} |")
    left = [
        (one, other)
        for one, other, gone in zip(
            last["ours"]["c4"]["texts"], last["own"]["c4"]["texts"], last["own"]["c4"]["reasons"], strict=True
        )
        if one is not None and gone is None
    ]
    print(f"\nOf {len(left):,} pages that both c4 filters keep, {sum(a == b for a, b in left):,} are left the same.\n")
    for name in FILTERS:
        for words in ("own", "spaces"):
            _, differ = agreement(last["ours"][name]["reasons"], last[words][name]["reasons"])
            told = ", ".join(f"{pair} ({count})" for pair, count in differ.most_common(6))
            print(f"- {name}, {words} words, ours / datatrove: {told or 'no difference'}")


if __name__ == "__main__":
    main()
