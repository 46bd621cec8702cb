"""Compares the decisions and the speed of the filters for web text with datatrove's.

    python benchmarks/filters.py --data DIR --peer-python OTHER/bin/python [--records 4000] [--repeats 3]

DIR holds ``gsm8k_{train,test}.jsonl``, ``banking77_{train,test}.csv`` and ``hh_harmless_test.jsonl.gz``. The peer has a
virtual environment of its own (``pip install datatrove==0.10.1 spacy nltk regex xxhash ftfy`` with the constraints of
this project).

Half of the pages are real texts: passages of GSM8K, dialogues of HH, lists of messages of Banking77. The others are
such pages with a planted flaw that one of the rules detects: repeated lines, paragraphs or stretches of words, lines
without an end, bullets, ellipses, hash signs, numbers, brackets, menus. Both programs use their defaults on one
processor core. The peer runs once with the words of its tokenizer and once with ours, which are split by whitespace, to
separate the effect of the words from that of the rules. A repeat runs all contenders one after the other; times are
medians, in processor time. The last row runs all four filters on each page, where the peer splits a page into words
once.
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

from posttrain.data.records.record import RECORD, assign_ids, records
from posttrain.data.steps.registry import STEPS

FILTERS = ("gopher", "gopher_repetition", "c4", "fineweb")
_PEER_SCRIPT = Path(__file__).with_name("peers") / "datatrove_filters.py"

FilterResults = dict[str, dict[str, Any]]


def passages(folder: Path) -> list[str]:
    """Return real pages of about 300 to 3,000 characters."""
    problems, messages, dialogues = [], [], []
    for split in ("train", "test"):
        for line in (folder / f"gsm8k_{split}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            problems.append(row["question"] + "\n" + row["answer"].split("\n####")[0])
        with (folder / f"banking77_{split}.csv").open(encoding="utf-8", newline="") as file:
            messages += [row["text"].strip() for row in csv.DictReader(file)]
    with gzip.open(folder / "hh_harmless_test.jsonl.gz", "rt", encoding="utf-8") as file:
        dialogues = [json.loads(line)["chosen"].strip() for line in file]
    problem_pages = ["\n\n".join(problems[start : start + 3]) for start in range(0, len(problems), 3)]
    message_pages = ["\n".join(messages[start : start + 10]) for start in range(0, len(messages), 10)]
    return problem_pages + message_pages + dialogues


def plant_flaw(page: str, kind: int, share: float) -> str:
    """Return the page with one kind of flaw in a share of it."""
    lines, words = page.split("\n"), page.split()
    count = max(1, round(share * len(lines)))
    flaws: list[Callable[[], str]] = [
        lambda: "\n".join(lines + lines[:1] * count),
        lambda: "\n\n".join([page, *["\n".join(lines[:2])] * count]),
        lambda: " ".join(words + words[: max(1, round(share * len(words)))]),
        lambda: "\n".join(line.rstrip(".?!") if number < count else line for number, line in enumerate(lines)),
        lambda: "\n".join(f"- {line}" if number < count else line for number, line in enumerate(lines)),
        lambda: "\n".join(f"{line}..." if number < count else line for number, line in enumerate(lines)),
        lambda: " ".join(f"#{word}" if number < share * len(words) / 3 else word for number, word in enumerate(words)),
        lambda: " ".join(str(number) if number < share * len(words) else word for number, word in enumerate(words)),
        lambda: "\n".join([*lines, "if (page) { show(); }"]),
        lambda: "\n".join(["Home", "About us", "Contact", *lines[:count], "Terms of use", "Read more"]),
    ]
    return flaws[kind % len(flaws)]()


def pages(folder: Path, count: int, seed: int = 0) -> list[str]:
    """Return ``count`` pages, every other one with a flaw."""
    generator = np.random.default_rng(seed)
    originals = passages(folder)
    rows = generator.integers(len(originals), size=count).tolist()
    shares = generator.random(count).tolist()
    return [
        plant_flaw(originals[row], number // 2, share) if number % 2 else originals[row]
        for number, (row, share) in enumerate(zip(rows, shares, strict=True))
    ]


def ours(texts: Sequence[str]) -> FilterResults:
    """Return the seconds and decisions of our steps, in the form that the peer prints."""
    empty_record = {**dict.fromkeys(RECORD.names), "source": "pages", "meta": "{}"}
    table = assign_ids(records([{**empty_record, "text": text, "line": number} for number, text in enumerate(texts)]))
    results: FilterResults = {}
    for name in FILTERS:
        step = STEPS[name]()
        start = time.process_time()
        output, rejections, *_ = step.apply(table)  # type: ignore[attr-defined]
        seconds = time.process_time() - start
        reasons = dict(zip(rejections["line"].to_pylist(), rejections["reason"].to_pylist(), strict=True))
        output_texts = dict(zip(output["line"].to_pylist(), output["text"].to_pylist(), strict=True))
        rows = range(len(texts))
        results[name] = {
            "seconds": seconds,
            "reasons": [reasons.get(row) for row in rows],
            "texts": [output_texts.get(row) for row in rows],
        }
    results["all"] = {"seconds": sum(result["seconds"] for result in results.values())}
    return results


def peer(python: str, texts: str, splitter: str) -> FilterResults:
    """Run the peer's filters on the file ``texts``, with the words of ``splitter``: ``own`` or ``spaces``."""
    process = subprocess.run([python, str(_PEER_SCRIPT), texts, splitter], capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"the peer failed:\n{process.stderr}")
    return dict(json.loads(process.stdout.splitlines()[-1]))


def agreement(our_reasons: Sequence[str | None], peer_reasons: Sequence[str | None]) -> tuple[float, Counter[str]]:
    """Return the share of equal decisions, and the number of each pair of reasons where they differ."""
    pairs = list(zip(our_reasons, peer_reasons, strict=True))
    differences = Counter(f"{a or 'stays'} / {b or 'stays'}" for a, b in pairs if (a is None) != (b is None))
    return 1 - differences.total() / len(pairs), differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    texts = pages(arguments.data, arguments.records)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    last_results: dict[str, FilterResults] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(texts, file)
        file.flush()
        for _ in range(arguments.repeats):
            last_results = {"ours": ours(texts)}
            for splitter in ("own", "spaces"):
                last_results[splitter] = peer(arguments.peer_python, file.name, splitter)
            for contender, results in last_results.items():
                for name, result in results.items():
                    seconds[contender, name].append(result["seconds"])
    speed = {key: len(texts) / statistics.median(values) for key, values in seconds.items()}

    print(f"{len(texts):,} pages of {statistics.mean(map(len, texts)):,.0f} characters; {arguments.repeats} repeats\n")
    print("| filter | ours, pages/s | datatrove, pages/s | ratio | with words parted by spaces | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in (*FILTERS, "all"):
        our_speed = speed["ours", name]
        cells = [f"{our_speed:,.0f}"]
        for splitter in ("own", "spaces"):
            peer_speed = speed[splitter, name]
            cells += [f"{peer_speed:,.0f}", f"{our_speed / peer_speed:.1f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| filter | ours rejects | datatrove rejects | equal decisions | equal with words parted by spaces |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in FILTERS:
        reasons = {contender: last_results[contender][name]["reasons"] for contender in ("ours", "own", "spaces")}
        rejection_rates = [np.mean([reason is not None for reason in reasons[key]]) for key in ("ours", "own")]
        agreement_rates = [agreement(reasons["ours"], reasons[splitter])[0] for splitter in ("own", "spaces")]
        cells = [f"{rate:.1%}" for rate in rejection_rates] + [f"{rate:.2%}" for rate in agreement_rates]
        print(f"| {name} | {' | '.join(cells)} |")
    text_pairs = [
        (our_text, peer_text)
        for our_text, peer_text, peer_reason in zip(
            last_results["ours"]["c4"]["texts"],
            last_results["own"]["c4"]["texts"],
            last_results["own"]["c4"]["reasons"],
            strict=True,
        )
        if our_text is not None and peer_reason is None
    ]
    n_equal = sum(a == b for a, b in text_pairs)
    print(f"\nBoth c4 filters keep {len(text_pairs):,} pages, and return the same text for {n_equal:,} of them.\n")
    for name in FILTERS:
        for splitter in ("own", "spaces"):
            _, differences = agreement(last_results["ours"][name]["reasons"], last_results[splitter][name]["reasons"])
            summary = ", ".join(f"{pair} ({count})" for pair, count in differences.most_common(6))
            print(f"- {name}, {splitter} words, ours / datatrove: {summary or 'no difference'}")


if __name__ == "__main__":
    main()
