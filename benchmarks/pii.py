"""Compares the detection of personal data with datatrove's PIIFormatter and Presidio's pattern recognisers.

    python benchmarks/pii.py --data DIR [--peer-python PEER/bin/python] [--records 4000] [--repeats 3]

The folder holds ``banking77_train.csv`` and ``gsm8k_train.jsonl``, whose texts contain no personal data. The benchmark
inserts sentences with invented addresses and numbers into some of them; half of these sentences hold data that only
resemble personal data: amounts, dates, versions, numbers with a wrong check digit. A piece counts as found if a finding
of its kind covers at least half of it and extends at most three characters beyond it. The peers have a virtual
environment of their own: ``pip install datatrove presidio-analyzer``. The benchmark calls all of Presidio's recognisers
that need no language model; the model would only add names and places.
"""

import argparse
import csv
import json
import random
import statistics
import string
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.pii.checksums import is_card, is_iban, is_resident_id
from posttrain.data.pii.detect import KINDS, detect
from posttrain.data.records.record import RECORD, assign_ids, records
from posttrain.data.steps.pii import PersonalData

TEMPLATES = {
    "email": ["You can write to {}.", "mail: {}, thanks", "My address ({}) has changed", "请发邮件到{}。"],
    "phone": ["Please call {}.", "My number is {}, any time.", "({}) is where I am reached", "我的电话是{}，谢谢"],
    "ip": ["The request came from {}.", "ping {} fails", "server={} port=80"],
    "card": ["My card is {}.", "Charged {} twice", "卡号{}不能用", "card number {}, expires 11/27"],
    "iban": ["Send it to {}.", "IBAN {} please", "account: {}"],
    "resident_id": ["身份证号{}。", "ID {}", "my id card says {}, is it right?"],
    "ssn": ["SSN {}.", "my social security number is {}"],
}
NEGATIVE_TEMPLATES = [
    "It costs {n3},{n3} or {n2}.{n2} each.",
    "So {n5} + {n4} = {n5} and {n7}-{n6}={n6}.",
    "On 20{y}-{m}-{d} at {h}:{s}:{s} it failed.",
    "Due {d}/{m}/20{y} or {d}.{m}.20{y} {h}:{s}.",
    "We run version {n1}.{n1}.{n2}.{n1} of it.",
    "The order {n10} and ticket {n8}-{n2} are late.",
    "See ISBN 978-{n1}-{n4}-{n4}-{n1}.",
    "The total is {n12}, about {n1}.{n11} of it.",
    "Follow @{w} and look at {w}@2x.png",
    "It is {n1}:{n2}:{n2}, std::{w} is used",
]
ENTITIES = {
    "EMAIL_ADDRESS": "email",
    "PHONE_NUMBER": "phone",
    "IP_ADDRESS": "ip",
    "CREDIT_CARD": "card",
    "IBAN_CODE": "iban",
    "US_SSN": "ssn",
}

Finding = tuple[int, str, int, int]


def invent(kind: str, rng: random.Random) -> str:
    """Invent a piece of personal data that belongs to nobody."""

    def digits(count: int) -> str:
        return "".join(rng.choices(string.digits, k=count))

    def word() -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))

    if kind == "email":
        name = rng.choice([word(), f"{word()}.{word()}", f"{word()}_{digits(2)}", f"{word()}+{word()}"])
        return f"{name}@{word()}.{rng.choice(['com', 'org', 'co.uk', 'de', 'cn', 'io'])}"
    if kind == "phone":
        area, exchange = f"{rng.randint(2, 9)}0{digits(1)}", f"{rng.randint(2, 9)}{digits(2)}"
        return rng.choice(
            [
                f"+1 {area}-{exchange}-{digits(4)}",
                f"({area}) {exchange}-{digits(4)}",
                f"{area}-{exchange}-{digits(4)}",
                f"{area}.{exchange}.{digits(4)}",
                f"+44 20 {digits(4)} {digits(4)}",
                f"+49 30 {digits(7)}",
                f"+86 13{digits(9)}",
                f"13{digits(9)}",
                f"138 {digits(4)} {digits(4)}",
                f"010-6{digits(7)}",
                f"020 7{digits(3)} {digits(4)}",
                f"01 4{digits(1)} {digits(2)} {digits(2)} {digits(2)}",
                f"+33 6 {digits(2)} {digits(2)} {digits(2)} {digits(2)}",
            ]
        )
    if kind == "ip":
        if rng.random() < 0.3:
            return f"2a0{rng.randint(1, 9)}:{rng.randint(1, 9)}{digits(3)}::{rng.randint(1, 9)}{digits(2)}"
        return ".".join(str(rng.randint(low, high)) for low, high in ((20, 99), (1, 250), (1, 250), (1, 250)))
    if kind == "card":
        start = rng.choice(["4" + digits(14), "5" + str(rng.randint(1, 5)) + digits(13), "37" + digits(12)])
        number = next(start + check_digit for check_digit in string.digits if is_card(start + check_digit))
        if len(number) == 16 and rng.random() < 0.5:
            return rng.choice(" -").join(number[position : position + 4] for position in range(0, 16, 4))
        return number
    if kind == "iban":
        country, length = rng.choice([("DE", 22), ("FR", 27), ("ES", 24), ("NL", 18), ("GB", 22)])
        letters = {"NL": "ABNA", "GB": "NWBK"}.get(country, "")
        account = letters + digits(length - 4 - len(letters))
        code = next(iban for check in range(2, 99) if is_iban(iban := f"{country}{check:02}{account}"))
        groups = (code[position : position + 4] for position in range(0, length, 4))
        return " ".join(groups) if rng.random() < 0.5 else code
    if kind == "resident_id":
        start = f"11010519{rng.randint(50, 99)}{rng.randint(1, 12):02}{rng.randint(1, 28):02}{digits(3)}"
        return next(start + check_digit for check_digit in "0123456789X" if is_resident_id(start + check_digit))
    return f"{rng.randint(100, 665)}-{rng.randint(1, 99):02}-{rng.randint(1, 9999):04}"


def plant(texts: list[str], rng: random.Random) -> tuple[list[str], list[Finding]]:
    """Insert a sentence into every other text; return all texts, and the position of each piece of personal data."""
    planted_texts: list[str] = []
    truth: list[Finding] = []
    kinds = list(TEMPLATES)
    for row, text in enumerate(texts):
        words = text.split(" ")
        position = rng.randint(0, len(words))
        before, after = " ".join(words[:position]), " ".join(words[position:])
        if row % 4 == 0:
            kind = rng.choice(kinds)
            value, template = invent(kind, rng), rng.choice(TEMPLATES[kind])
            start = len(before) + 1 + template.index("{}")
            truth.append((row, kind, start, start + len(value)))
            text = f"{before} {template.format(value)} {after}"
        elif row % 4 == 1:
            text = f"{before} {_negative_sentence(rng)} {after}"
        planted_texts.append(text)
    return planted_texts, truth


def _negative_sentence(rng: random.Random) -> str:
    fillers = {f"n{n}": lambda n=n: str(rng.randint(10 ** (n - 1), 10**n - 1)) for n in range(1, 13)}
    fillers |= {"y": lambda: str(rng.randint(10, 29)), "m": lambda: f"{rng.randint(1, 12):02}"}
    fillers |= {"d": lambda: f"{rng.randint(1, 28):02}", "h": lambda: f"{rng.randint(0, 23):02}"}
    fillers |= {"s": lambda: f"{rng.randint(0, 59):02}", "w": lambda: "".join(rng.choices(string.ascii_lowercase, k=6))}
    text = rng.choice(NEGATIVE_TEMPLATES)
    for name, make in fillers.items():
        while f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", make(), 1)
    return text


def records_table(texts: list[str]) -> pa.Table:
    rows = [{**dict.fromkeys(RECORD.names), "text": text, "source": "f", "line": 1, "meta": "{}"} for text in texts]
    return assign_ids(records(rows))


def scores(findings: list[Finding], truth: list[Finding]) -> dict[str, tuple[float, float, int, int]]:
    """Return precision, recall, the number of pieces, and the number of false findings, by kind."""
    by_row: dict[tuple[int, str], list[Finding]] = {}
    for piece in truth:
        by_row.setdefault(piece[:2], []).append(piece)
    true_findings, hits = Counter[str](), set()
    for row, kind, start, end in findings:
        for piece in by_row.get((row, kind), []):
            overlap = min(end, piece[3]) - max(start, piece[2])
            if 2 * overlap >= piece[3] - piece[2] and start >= piece[2] - 3 and end <= piece[3] + 3:
                true_findings[kind] += 1
                hits.add(piece)
    n_pieces, n_findings = Counter(piece[1] for piece in truth), Counter(finding[1] for finding in findings)
    n_hits = Counter(piece[1] for piece in hits)
    return {
        kind: (
            true_findings[kind] / n_findings[kind] if n_findings[kind] else float("nan"),
            n_hits[kind] / n_pieces[kind] if n_pieces[kind] else float("nan"),
            n_pieces[kind],
            n_findings[kind] - true_findings[kind],
        )
        for kind in KINDS
    }


def median_seconds(step: PersonalData, table: pa.Table, repeats: int) -> float:
    """Return the processor seconds of the median run."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        step.apply(table)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def peer(script: str, python: str, texts: list[str], repeats: int) -> dict[str, Any]:
    """Run a peer's script in its own environment; return the JSON that it prints."""
    path = str(Path(__file__).with_name("peers") / script)
    task = json.dumps({"texts": texts, "repeats": repeats})
    process = subprocess.run([python, path], input=task, text=True, capture_output=True, check=False)
    if process.returncode:
        raise SystemExit(f"{script} failed:\n{process.stderr[-2000:]}")
    return dict(json.loads(process.stdout.splitlines()[-1]))


def main() -> None:
    """Plant personal data, run all detectors, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with (arguments.data / "banking77_train.csv").open(encoding="utf-8", newline="") as file:
        messages = [row["text"] for row in csv.DictReader(file)]
    lines = (arguments.data / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]
    rng = random.Random(arguments.seed)
    texts, truth = plant(rng.sample(messages + problems, arguments.records), rng)
    table = records_table(texts)
    times = {
        name: median_seconds(PersonalData(action="report", kinds=kinds), table, arguments.repeats)
        for name, kinds in (("ours", list(KINDS)), ("ours, e-mail and IP alone", ["email", "ip"]))
    }
    ours = [(row, *finding) for row, text in enumerate(texts) for finding in detect(text)]
    datatrove = peer("pii_datatrove.py", arguments.peer_python, texts, arguments.repeats)
    presidio = peer("pii_presidio.py", arguments.peer_python, texts, arguments.repeats)
    presidio_findings = [
        (int(row), ENTITIES[kind], int(start), int(end))
        for row, kind, start, end in presidio["found"]
        if kind in ENTITIES
    ]
    scores_by_program = {
        "ours": scores(ours, truth),
        "datatrove": scores([(row, kind, start, end) for row, kind, start, end in datatrove["found"]], truth),
        "Presidio": scores(presidio_findings, truth),
    }
    print("| kind | pieces | " + " | ".join(f"{name}: precision | recall" for name in scores_by_program) + " |")
    print("| --- |" + " --- |" * (1 + 2 * len(scores_by_program)))
    for kind in KINDS:
        cells = [str(scores_by_program["ours"][kind][2])]
        for by_kind in scores_by_program.values():
            precision, recall, _, false_findings = by_kind[kind]
            cells += [f"{precision:.3f} ({false_findings} wrong)" if precision == precision else "-", f"{recall:.3f}"]
        print(f"| {kind} | " + " | ".join(cells) + " |")
    speeds = {
        **{name: len(texts) / seconds for name, seconds in times.items()},
        "datatrove": len(texts) / statistics.median(datatrove["seconds"]),
        "Presidio": len(texts) / statistics.median(presidio["seconds"]),
    }
    print("\n| | records per processor second | ours is faster by |\n| --- | --- | --- |")
    for name, speed in speeds.items():
        print(f"| {name} | {speed:,.0f} | {speeds['ours'] / speed:.1f} |")
    negatives = messages + problems
    false_alarms = sum(len(detect(text)) for text in negatives)
    speed = len(negatives) / median_seconds(PersonalData(), records_table(negatives), arguments.repeats)
    print(
        f"\n{len(negatives):,} texts without personal data: {false_alarms} false alarms, "
        f"{speed:,.0f} texts a processor second"
    )


if __name__ == "__main__":
    main()
