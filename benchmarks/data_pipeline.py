"""From JSON lines to a dataset version: the time and the memory of ours and of datatrove's local executor.

    python benchmarks/data_pipeline.py --data DIR --peer-python OTHER/bin/python [--records 1000000] [--repeats 3]
        [--increment] [--memory] [--skip-peer] [--peer-defaults] [--peer-held-out]
        [--buckets 14] [--hashes 8] [--folder DIR]

DIR holds ``gsm8k_{train,test}.jsonl``. The peer has a virtual environment of its own (``pip install datatrove==0.10.1
spacy nltk regex 'xxhash<4' orjson tokenizers``; its hashes take no strings from xxhash 4 on).

The records are texts of about 1 KB, made of GSM8K's training sentences with every fourth word replaced; one in fifty is
an exact copy, one in ten a copy with up to a sixth of its words replaced, one in a thousand holds a test question. They
lie in two files of equal length, for datatrove's tasks divide files; both sides read the same two, on the same two
cores, with two worker processes. Steps: read and check, normalise, exact duplicates, MinHash at 0.8, a split of 1 % by
hash, 13-grams of GSM8K's test set, write.

What differs. Ours checks the encoding and the schema of every line, verifies every near duplicate by its exact Jaccard
similarity over runs of 5 characters, keeps clusters of near duplicates on one side of the split, decontaminates against
its own test split and against near duplicates of the suite as well, leaves out runs of words that more than ten test
records share, and keeps every rejected record with its reason. datatrove skips lines that it cannot read, compares
whole documents by a 64-bit hash (its ``ExactDedup`` steps), takes runs of 5 words, verifies nothing, and drops what it
rejects. With ``--peer-held-out`` it decontaminates against its test split too, for one more pass. Its 14 buckets of 8
hashes, the default, propose 92 % of the pairs at 0.8; ours, 18 of 5, propose 99.9 %. Unless ``--peer-defaults`` is
given, its words and its normal form are set as near to ours as they can be, with which it also is fastest; they, and
what else is set for its speed, stand in ``peers/datatrove_pipeline.py``.

A repeat runs one after the other, each in a process of its own; times are of the clock and leave out imports. With
``--memory`` the proportional set sizes (where the system does not tell, the resident ones) of a process and all its
children are added up, five times a second at most. With ``--increment`` ours then adds 1 % more records to the version.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

_PEER = Path(__file__).with_name("peers") / "datatrove_pipeline.py"
_CORES = 2
_SECONDS_A_SAMPLE = 0.2
_POOL = 20_000
_CHARACTERS = (520, 1320)
_STEPS = ("exact", "minhash", "decontaminate")

Answer = dict[str, Any]


def problems(folder: Path, part: str) -> list[dict[str, str]]:
    """Questions and answers of GSM8K."""
    return [json.loads(line) for line in (folder / f"gsm8k_{part}.jsonl").read_text(encoding="utf-8").splitlines()]


def sentences(folder: Path) -> list[list[str]]:
    """The words of GSM8K's training sentences that have more than three."""
    found = []
    for row in problems(folder, "train"):
        parts = (row["question"] + " " + row["answer"]).split(".")
        found += [[*words[:-1], words[-1] + "."] for words in map(str.split, parts) if len(words) > 3]
    return found


def corpus(folder: Path, seed: int = 0) -> Iterator[str]:
    """Texts without end, the same for the same seed."""
    draws = random.Random(seed)
    real, questions = sentences(folder), [row["question"] for row in problems(folder, "test")]
    vocabulary = sorted({word for words in real for word in words})
    pool: list[str] = []
    while True:
        kind = draws.random() if pool else 0.5
        if kind < 0.02:
            text = draws.choice(pool)
        elif kind < 0.12:
            parts = draws.choice(pool).split(" ")
            for _ in range(draws.randint(1, max(1, len(parts) // 6))):
                parts[draws.randrange(len(parts))] = draws.choice(vocabulary)
            text = " ".join(parts)
        else:
            text, least = "", draws.randint(*_CHARACTERS)
            while len(text) < least:
                # Words of their own keep texts that share a sentence from sharing long runs.
                words = [draws.choice(vocabulary) if draws.random() < 0.25 else word for word in draws.choice(real)]
                text += " ".join(words) + " "
            text = text.rstrip() if kind < 0.999 else text + draws.choice(questions)
        yield text
        if len(pool) < _POOL:
            pool.append(text)
        else:
            pool[draws.randrange(_POOL)] = text


def write(texts: Iterable[str], file: Path) -> int:
    """Write JSON lines; returns their bytes."""
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return file.stat().st_size


def ours(given: str, more: str, suite: str, workspace: str) -> None:
    """Build a version, and one with more records if there are any, in a process of its own; prints the seconds."""
    from posttrain.data.versions.named_build import build

    config = {
        "name": "corpus",
        "workspace": workspace,
        "steps": ["normalise", *_STEPS],
        "splits": {"test": 0.01},
        "suites": [{"file": suite, "columns": {"prompt": "question", "completion": "answer"}}],
        "engine": "processes",
        "workers": _CORES,
    }
    start = time.perf_counter()
    version = build({**config, "files": sorted(map(str, Path(given).iterdir()))})
    answer: Answer = {"seconds": time.perf_counter() - start, "kept": version.meta["counts"]["records"]}
    answer["removed"] = {
        step: sum(one["count"] for one in version.meta["funnel"] if one["step"] == step and one["reason"] != "in")
        for step in _STEPS
    }
    if more:
        start = time.perf_counter()
        version = build({**config, "files": [more]})
        answer["increment"] = time.perf_counter() - start
        answer["grown"] = version.meta["counts"]
    print(json.dumps(answer))


def family(process: int) -> Iterator[int]:
    """A process and all that came of it."""
    yield process
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended meanwhile


def memory(process: int) -> int:
    """Proportional set size in bytes, the resident one where that may not be read; 0 for what has ended."""
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = Path(f"/proc/{process}/{name}").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found = next((line for line in lines if line.startswith(key)), None)
        if found:
            return int(found.split()[1]) * 1024
    return 0


def run(command: Sequence[str], sample: bool) -> Answer:
    """What a contender prints at last, having run on two cores; ``peak``: bytes of all its processes, or None."""
    cores = sorted(os.sched_getaffinity(0))[:_CORES]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=out, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, cores), text=True
        )
        peak = 0
        while sample and process.poll() is None:
            start = time.perf_counter()
            peak = max(peak, sum(map(memory, family(process.pid))))
            # Reading the pages of large processes takes time from the same cores.
            time.sleep(max(_SECONDS_A_SAMPLE, 9 * (time.perf_counter() - start)))
        if process.wait():
            log.seek(0)
            raise SystemExit(f"{command[1]} failed:\n{log.read()[-4000:]}")
        out.seek(0)
        answer: Answer = json.loads(out.read().splitlines()[-1])
    return {**answer, "peak": peak if sample else None}


def table(answers: dict[str, list[Answer]], records: int) -> None:
    """Print medians of the repeats."""
    seconds = {name: statistics.median(one["seconds"] for one in found) for name, found in answers.items()}
    removed = " | ".join(f"{step} removes" for step in _STEPS)
    print(f"| | records/s | seconds | ours is faster by | peak memory, GB | {removed} | kept |")
    print("|---|---:|---:|---:|---:|" + "---:|" * len(_STEPS) + "---:|")
    for name, found in answers.items():
        peaks = [one["peak"] for one in found if one["peak"] is not None]
        peak = f"{max(peaks) / 1e9:.2f}" if peaks else "-"
        cells = [f"{records / seconds[name]:,.0f}", f"{seconds[name]:,.1f}", f"{seconds[name] / seconds['ours']:.2f}x"]
        cells += [peak, *(f"{found[0]['removed'][step]:,}" for step in _STEPS), f"{found[0]['kept']:,}"]
        print(f"| {name} | " + " | ".join(cells) + " |")
    spread = {name: [one["seconds"] for one in found] for name, found in answers.items()}
    print()
    for name, values in spread.items():
        print(f"- {name}: {', '.join(f'{value:.1f}' for value in values)} s")
    for name, found in answers.items():
        if "stages" in found[0]:
            print(f"\n| stage of {name} | seconds | share |\n|---|---:|---:|")
            for stage in found[0]["stages"]:
                value = statistics.median(one["stages"][stage] for one in found)
                print(f"| {stage} | {value:,.1f} | {value / seconds[name]:.0%} |")
    if "increment" in answers["ours"][0]:
        value = statistics.median(one["increment"] for one in answers["ours"])
        share = statistics.median(one["increment"] / one["seconds"] for one in answers["ours"])
        grown = answers["ours"][0]["grown"]
        print(f"\n1 % more records, {grown['read']:,} in all and {grown['records']:,} kept:", end=" ")
        print(f"{value:.2f} s, {share:.1%} of the full time.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument(
        "--peer-defaults", action="store_true", help="its own words and normal form: some five times slower"
    )
    parser.add_argument("--peer-held-out", action="store_true", help="it decontaminates against its test split too")
    parser.add_argument("--buckets", type=int, default=14, help="of the peer's MinHash")
    parser.add_argument("--hashes", type=int, default=8, help="in each of the peer's buckets")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--increment", action="store_true", help="add 1 %% more records to ours")
    parser.add_argument("--memory", action="store_true", help="sample the memory of all processes")
    parser.add_argument("--folder", type=Path, help="where everything is written for the time being")
    arguments = parser.parse_args()
    if not arguments.skip_peer and not arguments.peer_python:
        parser.error("name --peer-python, or --skip-peer")
    suite = str((arguments.data / "gsm8k_test.jsonl").resolve())
    answers: dict[str, list[Answer]] = {"ours": []} if arguments.skip_peer else {"ours": [], "datatrove": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        given, work, more = folder / "given", folder / "work", folder / "more.jsonl"
        given.mkdir()
        texts = corpus(arguments.data)
        half = arguments.records // 2
        size = write(islice(texts, half), given / "0.jsonl")
        size += write(islice(texts, arguments.records - half), given / "1.jsonl")
        write(islice(texts, max(1, arguments.records // 100)), more)
        print(f"{arguments.records:,} records, {size / 1e9:.3f} GB, {arguments.repeats} repeats\n", flush=True)
        setting = "own" if arguments.peer_defaults else "near"
        settings = [setting, str(arguments.buckets), str(arguments.hashes)]
        settings += ["held-out"] if arguments.peer_held_out else []
        grown = str(more) if arguments.increment else ""
        commands = {
            "ours": [sys.executable, __file__, "--ours", str(given), grown, suite, str(work)],
            "datatrove": [str(arguments.peer_python), str(_PEER), str(given), suite, str(work), *settings],
        }
        for _ in range(arguments.repeats):
            for contender, found in answers.items():
                work.mkdir()
                found.append(run(commands[contender], arguments.memory))
                shutil.rmtree(work)
    table(answers, arguments.records)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        ours(*sys.argv[2:])
    else:
        main()
