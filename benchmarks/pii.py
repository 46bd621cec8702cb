"""Personal data found: ours against datatrove's PIIFormatter and Presidio's pattern recognisers, in one run.

    python benchmarks/pii.py --data DIR [--peer-python PEER/bin/python] [--records 4000] [--repeats 3]

The folder holds Banking77's and GSM8K's files, ``banking77_train.csv`` and ``gsm8k_train.jsonl``, whose texts have no
personal data. Into some of them sentences with made-up addresses and numbers are put, which are then looked for; half
of these sentences hold what only looks like personal data: amounts, dates, versions, numbers with a wrong check digit.
A piece counts as found where a finding of its kind covers at least half of it and reaches at most three characters
beyond it. The peers are installed by themselves: ``pip install datatrove presidio-analyzer``. Presidio's recognisers
are called directly, all of those without a language model: what its model adds are names and places.
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
from posttrain.data.records.identity import assign_ids
from posttrain.data.records.schema import RECORD, records
from posttrain.data.steps.pii import PersonalData

AROUND = {
    "email": ["You can write to {}.", "mail: {}, thanks", "My address ({}) has changed", "请发邮件到{}。"],
    "phone": ["Please call {}.", "My number is {}, any time.", "({}) is where I am reached", "我的电话是{}，谢谢"],
    "ip": ["The request came from {}.", "ping {} fails", "server={} port=80"],
    "card": ["My card is {}.", "Charged {} twice", "卡号{}不能用", "card number {}, expires 11/27"],
    "iban": ["Send it to {}.", "IBAN {} please", "account: {}"],
    "resident_id": ["身份证号{}。", "ID {}", "my id card says {}, is it right?"],
    "ssn": ["SSN {}.", "my social security number is {}"],
}
NOTHING = [
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


def made_up(kind: str, draw: random.Random) -> str:
    """A piece of personal data of nobody's."""

    def digits(count: int) -> str:
        return "".join(draw.choices(string.digits, k=count))

    def word() -> str:
        return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9)))

    if kind == "email":
        name = draw.choice([word(), f"{word()}.{word()}", f"{word()}_{digits(2)}", f"{word()}+{word()}"])
        return f"{name}@{word()}.{draw.choice(['com', 'org', 'co.uk', 'de', 'cn', 'io'])}"
    if kind == "phone":
        area, exchange = f"{draw.randint(2, 9)}0{digits(1)}", f"{draw.randint(2, 9)}{digits(2)}"
        return draw.choice(
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
        if draw.random() < 0.3:
            return f"2a0{draw.randint(1, 9)}:{draw.randint(1, 9)}{digits(3)}::{draw.randint(1, 9)}{digits(2)}"
        return ".".join(str(draw.randint(low, high)) for low, high in ((20, 99), (1, 250), (1, 250), (1, 250)))
    if kind == "card":
        start = draw.choice(["4" + digits(14), "5" + str(draw.randint(1, 5)) + digits(13), "37" + digits(12)])
        number = next(start + last for last in string.digits if is_card(start + last))
        if len(number) == 16 and draw.random() < 0.5:
            return draw.choice(" -").join(number[place : place + 4] for place in range(0, 16, 4))
        return number
    if kind == "iban":
        country, length = draw.choice([("DE", 22), ("FR", 27), ("ES", 24), ("NL", 18), ("GB", 22)])
        letters = {"NL": "ABNA", "GB": "NWBK"}.get(country, "")
        account = letters + digits(length - 4 - len(letters))
        code = next(one for check in range(2, 99) if is_iban(one := f"{country}{check:02}{account}"))
        return " ".join(code[place : place + 4] for place in range(0, length, 4)) if draw.random() < 0.5 else code
    if kind == "resident_id":
        start = f"11010519{draw.randint(50, 99)}{draw.randint(1, 12):02}{draw.randint(1, 28):02}{digits(3)}"
        return next(start + last for last in "0123456789X" if is_resident_id(start + last))
    return f"{draw.randint(100, 665)}-{draw.randint(1, 99):02}-{draw.randint(1, 9999):04}"


def planted(texts: list[str], draw: random.Random) -> tuple[list[str], list[Finding]]:
    """Every other text with a sentence put in, and where the personal data in them stands."""
    made: list[str] = []
    truth: list[Finding] = []
    kinds = list(AROUND)
    for row, text in enumerate(texts):
        words = text.split(" ")
        at = draw.randint(0, len(words))
        before, after = " ".join(words[:at]), " ".join(words[at:])
        if row % 4 == 0:
            kind = draw.choice(kinds)
            value, around = made_up(kind, draw), draw.choice(AROUND[kind])
            start = len(before) + 1 + around.index("{}")
            truth.append((row, kind, start, start + len(value)))
            text = f"{before} {around.format(value)} {after}"
        elif row % 4 == 1:
            text = f"{before} {_nothing(draw)} {after}"
        made.append(text)
    return made, truth


def _nothing(draw: random.Random) -> str:
    parts = {
        f"n{count}": lambda count=count: str(draw.randint(10 ** (count - 1), 10**count - 1)) for count in range(1, 13)
    }
    parts |= {"y": lambda: str(draw.randint(10, 29)), "m": lambda: f"{draw.randint(1, 12):02}"}
    parts |= {"d": lambda: f"{draw.randint(1, 28):02}", "h": lambda: f"{draw.randint(0, 23):02}"}
    parts |= {"s": lambda: f"{draw.randint(0, 59):02}", "w": lambda: "".join(draw.choices(string.ascii_lowercase, k=6))}
    text = draw.choice(NOTHING)
    for name, make in parts.items():
        while f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", make(), 1)
    return text


def _table(texts: list[str]) -> pa.Table:
    rows = [{**dict.fromkeys(RECORD.names), "text": text, "source": "f", "line": 1, "meta": "{}"} for text in texts]
    return assign_ids(records(rows))


def scores(found: list[Finding], truth: list[Finding]) -> dict[str, tuple[float, float, int, int]]:
    """By kind: precision, recall, pieces there are, findings that are none."""
    by_row: dict[tuple[int, str], list[Finding]] = {}
    for one in truth:
        by_row.setdefault(one[:2], []).append(one)
    right, hit = Counter[str](), set()
    for row, kind, start, end in found:
        for one in by_row.get((row, kind), []):
            covered = min(end, one[3]) - max(start, one[2])
            if 2 * covered >= one[3] - one[2] and start >= one[2] - 3 and end <= one[3] + 3:
                right[kind] += 1
                hit.add(one)
    there, given = Counter(one[1] for one in truth), Counter(one[1] for one in found)
    got = Counter(one[1] for one in hit)
    return {
        kind: (
            right[kind] / given[kind] if given[kind] else float("nan"),
            got[kind] / there[kind] if there[kind] else float("nan"),
            there[kind],
            given[kind] - right[kind],
        )
        for kind in KINDS
    }


def timed(step: PersonalData, table: pa.Table, repeats: int) -> float:
    """Processor seconds of the median run."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        step.apply(table)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def peer(script: str, python: str, texts: list[str], repeats: int) -> dict[str, Any]:
    """What a peer's script in its own environment prints."""
    path = str(Path(__file__).with_name("peers") / script)
    given = json.dumps({"texts": texts, "repeats": repeats})
    done = subprocess.run([python, path], input=given, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Plant, look, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with (arguments.data / "banking77_train.csv").open(encoding="utf-8", newline="") as file:
        bank = [row["text"] for row in csv.DictReader(file)]
    lines = (arguments.data / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    maths = [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]
    draw = random.Random(arguments.seed)
    texts, truth = planted(draw.sample(bank + maths, arguments.records), draw)
    table = _table(texts)
    times = {
        name: timed(PersonalData(action="report", kinds=kinds), table, arguments.repeats)
        for name, kinds in (("ours", list(KINDS)), ("ours, e-mail and IP alone", ["email", "ip"]))
    }
    ours = [(row, *one) for row, text in enumerate(texts) for one in detect(text)]
    trove = peer("pii_datatrove.py", arguments.peer_python, texts, arguments.repeats)
    presidio = peer("pii_presidio.py", arguments.peer_python, texts, arguments.repeats)
    theirs = [
        (int(row), ENTITIES[kind], int(start), int(end))
        for row, kind, start, end in presidio["found"]
        if kind in ENTITIES
    ]
    found = {
        "ours": scores(ours, truth),
        "datatrove": scores([(row, kind, start, end) for row, kind, start, end in trove["found"]], truth),
        "Presidio": scores(theirs, truth),
    }
    print("| kind | pieces | " + " | ".join(f"{name}: precision | recall" for name in found) + " |")
    print("| --- |" + " --- |" * (1 + 2 * len(found)))
    for kind in KINDS:
        cells = [str(found["ours"][kind][2])]
        for by_kind in found.values():
            precision, recall, _, wrong = by_kind[kind]
            cells += [f"{precision:.3f} ({wrong} wrong)" if precision == precision else "-", f"{recall:.3f}"]
        print(f"| {kind} | " + " | ".join(cells) + " |")
    speeds = {
        **{name: len(texts) / seconds for name, seconds in times.items()},
        "datatrove": len(texts) / statistics.median(trove["seconds"]),
        "Presidio": len(texts) / statistics.median(presidio["seconds"]),
    }
    print("\n| | records per processor second | ours is faster by |\n| --- | --- | --- |")
    for name, speed in speeds.items():
        print(f"| {name} | {speed:,.0f} | {speeds['ours'] / speed:.1f} |")
    negatives = bank + maths
    alarms = sum(len(detect(text)) for text in negatives)
    speed = len(negatives) / timed(PersonalData(), _table(negatives), arguments.repeats)
    print(
        f"\nTexts without personal data: {alarms} false alarms in {len(negatives):,}, {speed:,.0f} a processor second"
    )


if __name__ == "__main__":
    main()
