"""Measures the time and memory from JSON lines to a dataset version, against datatrove's local executor.

    python benchmarks/data_pipeline.py --data DIR --peer-python OTHER/bin/python [--records 1000000] [--repeats 3]
        [--increment] [--memory] [--skip-peer] [--peer-defaults] [--peer-held-out]
        [--buckets 14] [--hashes 8] [--folder DIR]

DIR holds ``gsm8k_{train,test}.jsonl``. The peer has a virtual environment of its own (``pip install datatrove==0.10.1
spacy nltk regex 'xxhash<4' orjson tokenizers``; its hashes take no strings from xxhash 4 on).

The records are texts of about 1 KB, made of GSM8K's training sentences with every fourth word replaced; one in fifty is
an exact copy, one in ten a copy with up to a sixth of its words replaced, one in a thousand holds a test question. They
are in two files of equal length, as datatrove divides its tasks by file; both programs read the same two files, on the
same two cores, with two worker processes. Steps: read and check, normalise, exact duplicates, MinHash at 0.8, a split
of 1 % by hash, 13-grams of GSM8K's test set, write.

The two differ in their work. Ours checks the encoding and the schema of every line, verifies every near duplicate by
its exact Jaccard similarity over runs of 5 characters, keeps clusters of near duplicates in one split, decontaminates
against its own test split and against near duplicates of the suite as well, leaves out runs of words that more than ten
test records share, and keeps every rejected record with its reason. datatrove skips lines that it cannot read, compares
whole documents by a 64-bit hash (its ``ExactDedup`` steps), uses runs of 5 words, verifies nothing, and drops rejected
records. With ``--peer-held-out`` it decontaminates against its test split too, in one more pass. Its 14 buckets of 8
hashes, the default, propose 92 % of the pairs at 0.8; ours, 18 of 5, propose 99.9 %. Without ``--peer-defaults`` its
words and its normal form are set as near to ours as they can be, which is also its fastest setting.
``peers/datatrove_pipeline.py`` lists this setting and all others that are made for its speed.

A repeat runs one after the other, each in a process of its own; seconds are wall-clock time without imports. With
``--memory`` the benchmark sums the proportional set sizes of a process and all its children (the resident set sizes
where the system does not report them), at most five times a second. With ``--increment`` ours then adds 1 % more
records to the version.
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

_PEER_SCRIPT = Path(__file__).with_name("peers") / "datatrove_pipeline.py"
_CORES = 2
_SAMPLE_SECONDS = 0.2
_POOL = 20_000
_TEXT_LENGTHS = (520, 1320)
_STEPS = ("exact", "minhash", "decontaminate")

Result = dict[str, Any]


def problems(folder: Path, split: str) -> list[dict[str, str]]:
    """Read the questions and answers of a split of GSM8K."""
    return [json.loads(line) for line in (folder / f"gsm8k_{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def sentences(folder: Path) -> list[list[str]]:
    """Return the words of each of GSM8K's training sentences that has more than three."""
    token_lists = []
    for row in problems(folder, "train"):
        parts = (row["question"] + " " + row["answer"]).split(".")
        token_lists += [[*words[:-1], words[-1] + "."] for words in map(str.split, parts) if len(words) > 3]
    return token_lists


def corpus(folder: Path, seed: int = 0) -> Iterator[str]:
    """Yield texts without end, the same for the same seed."""
    generator = random.Random(seed)
    originals, questions = sentences(folder), [row["question"] for row in problems(folder, "test")]
    vocabulary = sorted({word for words in originals for word in words})
    pool: list[str] = []
    while True:
        kind = generator.random() if pool else 0.5
        if kind < 0.02:
            text = generator.choice(pool)
        elif kind < 0.12:
            tokens = generator.choice(pool).split(" ")
            for _ in range(generator.randint(1, max(1, len(tokens) // 6))):
                tokens[generator.randrange(len(tokens))] = generator.choice(vocabulary)
            text = " ".join(tokens)
        else:
            text, min_length = "", generator.randint(*_TEXT_LENGTHS)
            while len(text) < min_length:
                # The random words keep texts that share a sentence from sharing long runs of words.
                words = [
                    generator.choice(vocabulary) if generator.random() < 0.25 else word
                    for word in generator.choice(originals)
                ]
                text += " ".join(words) + " "
            text = text.rstrip() if kind < 0.999 else text + generator.choice(questions)
        yield text
        if len(pool) < _POOL:
            pool.append(text)
        else:
            pool[generator.randrange(_POOL)] = text


def write(texts: Iterable[str], file: Path) -> int:
    """Write the texts as JSON lines, and return the file's size in bytes."""
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return file.stat().st_size


def ours(folder: str, increment: str, suite: str, workspace: str) -> None:
    """Build a version, and one with the records of the file ``increment`` added if that is given; print the result.

    Runs in a process of its own.
    """
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
    version = build({**config, "files": sorted(map(str, Path(folder).iterdir()))})
    result: Result = {"seconds": time.perf_counter() - start, "kept": version.meta["counts"]["records"]}
    result["removed"] = {
        step: sum(
            entry["count"] for entry in version.meta["funnel"] if entry["step"] == step and entry["reason"] != "in"
        )
        for step in _STEPS
    }
    if increment:
        start = time.perf_counter()
        version = build({**config, "files": [increment]})
        result["increment"] = time.perf_counter() - start
        result["grown"] = version.meta["counts"]
    print(json.dumps(result))


def process_tree(process: int) -> Iterator[int]:
    """Yield the ids of a process and of all its descendants."""
    yield process
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from process_tree(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return  # the process has ended meanwhile


def memory(process: int) -> int:
    """Return the proportional set size in bytes, or the resident one where that cannot be read; 0 after the end."""
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = Path(f"/proc/{process}/{name}").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        line = next((candidate for candidate in lines if candidate.startswith(key)), None)
        if line:
            return int(line.split()[1]) * 1024
    return 0


def run(command: Sequence[str], sample: bool) -> Result:
    """Run a contender on two cores, and return the JSON of its last line.

    Args:
        sample: whether to add ``peak``, the most bytes that all its processes held together, else None.
    """
    cores = sorted(os.sched_getaffinity(0))[:_CORES]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=out, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, cores), text=True
        )
        peak = 0
        while sample and process.poll() is None:
            start = time.perf_counter()
            peak = max(peak, sum(map(memory, process_tree(process.pid))))
            # Reading the page tables of large processes takes time from the same cores: sleep nine times as long.
            time.sleep(max(_SAMPLE_SECONDS, 9 * (time.perf_counter() - start)))
        if process.wait():
            log.seek(0)
            raise SystemExit(f"{command[1]} failed:\n{log.read()[-4000:]}")
        out.seek(0)
        result: Result = json.loads(out.read().splitlines()[-1])
    return {**result, "peak": peak if sample else None}


def table(results: dict[str, list[Result]], records: int) -> None:
    """Print the medians of the repeats."""
    seconds = {name: statistics.median(run["seconds"] for run in runs) for name, runs in results.items()}
    removal_columns = " | ".join(f"{step} removes" for step in _STEPS)
    print(f"| | records/s | seconds | ours is faster by | peak memory, GB | {removal_columns} | kept |")
    print("|---|---:|---:|---:|---:|" + "---:|" * len(_STEPS) + "---:|")
    for name, runs in results.items():
        peaks = [run["peak"] for run in runs if run["peak"] is not None]
        peak = f"{max(peaks) / 1e9:.2f}" if peaks else "-"
        cells = [f"{records / seconds[name]:,.0f}", f"{seconds[name]:,.1f}", f"{seconds[name] / seconds['ours']:.2f}x"]
        cells += [peak, *(f"{runs[0]['removed'][step]:,}" for step in _STEPS), f"{runs[0]['kept']:,}"]
        print(f"| {name} | " + " | ".join(cells) + " |")
    spread = {name: [run["seconds"] for run in runs] for name, runs in results.items()}
    print()
    for name, values in spread.items():
        print(f"- {name}: {', '.join(f'{value:.1f}' for value in values)} s")
    for name, runs in results.items():
        if "stages" in runs[0]:
            print(f"\n| stage of {name} | seconds | share |\n|---|---:|---:|")
            for stage in runs[0]["stages"]:
                value = statistics.median(run["stages"][stage] for run in runs)
                print(f"| {stage} | {value:,.1f} | {value / seconds[name]:.0%} |")
    if "increment" in results["ours"][0]:
        value = statistics.median(run["increment"] for run in results["ours"])
        share = statistics.median(run["increment"] / run["seconds"] for run in results["ours"])
        counts = results["ours"][0]["grown"]
        print(f"\nAdding 1 % more records, {counts['read']:,} in all and {counts['records']:,} kept, takes", end=" ")
        print(f"{value:.2f} s, {share:.1%} of the full time.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument(
        "--peer-defaults", action="store_true", help="keep the peer's own words and normal form: some five times slower"
    )
    parser.add_argument(
        "--peer-held-out", action="store_true", help="decontaminate the peer against its test split too"
    )
    parser.add_argument("--buckets", type=int, default=14, help="buckets of the peer's MinHash")
    parser.add_argument("--hashes", type=int, default=8, help="hashes in each of the peer's buckets")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--increment", action="store_true", help="add 1 %% more records to ours")
    parser.add_argument("--memory", action="store_true", help="sample the memory of all processes")
    parser.add_argument("--folder", type=Path, help="folder for all temporary files")
    arguments = parser.parse_args()
    if not arguments.skip_peer and not arguments.peer_python:
        parser.error("name --peer-python, or --skip-peer")
    suite = str((arguments.data / "gsm8k_test.jsonl").resolve())
    results: dict[str, list[Result]] = {"ours": []} if arguments.skip_peer else {"ours": [], "datatrove": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        input_folder, work_folder, increment_file = folder / "input", folder / "work", folder / "increment.jsonl"
        input_folder.mkdir()
        texts = corpus(arguments.data)
        half = arguments.records // 2
        size = write(islice(texts, half), input_folder / "0.jsonl")
        size += write(islice(texts, arguments.records - half), input_folder / "1.jsonl")
        write(islice(texts, max(1, arguments.records // 100)), increment_file)
        print(f"{arguments.records:,} records, {size / 1e9:.3f} GB, {arguments.repeats} repeats\n", flush=True)
        setting = "own" if arguments.peer_defaults else "near"
        settings = [setting, str(arguments.buckets), str(arguments.hashes)]
        settings += ["held-out"] if arguments.peer_held_out else []
        increment = str(increment_file) if arguments.increment else ""
        commands = {
            "ours": [sys.executable, __file__, "--ours", str(input_folder), increment, suite, str(work_folder)],
            "datatrove": [
                str(arguments.peer_python),
                str(_PEER_SCRIPT),
                str(input_folder),
                suite,
                str(work_folder),
                *settings,
            ],
        }
        for _ in range(arguments.repeats):
            for contender, runs in results.items():
                work_folder.mkdir()
                runs.append(run(commands[contender], arguments.memory))
                shutil.rmtree(work_folder)
    table(results, arguments.records)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ours"]:
        ours(*sys.argv[2:])
    else:
        main()
