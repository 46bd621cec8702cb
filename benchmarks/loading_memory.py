"""Measures the memory and the time to load, score, evaluate and save a model: ours and transformers'.

    python benchmarks/loading_memory.py --model DIR [--repeats 3]

DIR is a model in Hugging Face layout. Each contender and dtype runs in a process of its own, all one after the other in
each repeat. Before the measurement the process imports everything and does the same with a tiny model, so that neither
the libraries' own memory nor their first calls count. Memory is the growth of the process's resident bytes from before
the model was loaded to the peak of an action (VmHWM of /proc/self/status, reset before each action through
/proc/self/clear_refs, so Linux only), as a multiple of the bytes of the weights in that dtype. Private bytes are those
after the action that are not mapped from a file: mapped weights are in memory once for all processes that load the
model, and the system may drop and read them again. The largest of the repeats counts for memory, the smallest for time.

ours: `load_language_model`, which reads all weights to check that they are finite, and two forward passes over two
tokens to check the head. transformers: `AutoModelForCausalLM.from_pretrained`, which maps weights in the file's own
dtype and reads them only when they are used; both run the same forward pass over 256 tokens. Scoring, evaluation,
merging an adapter and saving in bfloat16 are ours alone; both save in the dtype that they loaded.
"""

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RESULT = "RESULT"
_LABELS = ["refund", "card lost", "top up", "exchange rate"]
_CONTENDERS = ("ours", "transformers")
_DTYPES = ("bfloat16", "float32")


def main() -> None:
    """Run every contender in processes of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        # The prefix marks the result among the lines that libraries print.
        print(_RESULT + json.dumps(_measure(*arguments.run, arguments.model)))
        return
    results: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
    for _ in range(arguments.repeats):
        for dtype in _DTYPES:
            for contender in _CONTENDERS:
                command = [sys.executable, __file__, "--model", str(arguments.model), "--run", contender, dtype]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{contender}, {dtype}\n{done.stderr}")
                line = next(line for line in done.stdout.splitlines() if line.startswith(_RESULT))
                results.setdefault((contender, dtype), []).append(json.loads(line.removeprefix(_RESULT)))
    print("| action | dtype | | peak / weights | private / weights | processor s |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for dtype in _DTYPES:
        for action in results["ours", dtype][0]:
            for contender in _CONTENDERS:
                runs = [run[action] for run in results[contender, dtype] if action in run]
                if runs:
                    peak, private, _ = map(max, zip(*runs, strict=True))
                    seconds = min(run[2] for run in runs)
                    print(f"| {action} | {dtype} | {contender} | {peak:.2f} | {private:.2f} | {seconds:.2f} |")


def _measure(contender: str, dtype: str, model: Path) -> dict[str, list[float]]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    from posttrain.models.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        # For all that the libraries load and allocate on a first call.
        _run(contender, dtype, write_tiny_model(Path(folder) / "tiny"), Path(folder) / "warm-up")
        return _run(contender, dtype, model, Path(folder) / "measured")


def _run(contender: str, dtype: str, model: Path, out: Path) -> dict[str, list[float]]:
    gc.collect()
    base, results = _status(), {}
    size = _weight_bytes(model, dtype)

    def act(name: str, function: Callable[[], Any]) -> Any:
        Path("/proc/self/clear_refs").write_text("5")
        start = time.process_time()
        value = function()
        seconds = time.process_time() - start
        status = _status()
        peak, private = status["VmHWM"] - base["VmRSS"], status["RssAnon"] - base["RssAnon"]
        results[name] = [peak / size, private / size, seconds]
        return value

    (_ours if contender == "ours" else _transformers)(act, dtype, model, out)
    return results


def _ours(act: Callable[[str, Callable[[], Any]], Any], dtype: str, model: Path, out: Path) -> None:
    from posttrain.evaluate.config import SuiteConfig
    from posttrain.evaluate.suite import run_suite
    from posttrain.models.language_model import load_language_model, save_language_model
    from posttrain.models.likelihood import label_scores
    from posttrain.models.task import TaskConfig
    from posttrain.train.lora import add_adapter, merge_adapter
    from posttrain.train.lora_config import LoraConfig

    lm = act("load", lambda: load_language_model(model, TaskConfig(labels=_LABELS), dtype))
    act("forward pass", lambda: _forward(lm.model))
    prompts = [[{"role": "user", "content": f"Message {number}: where is my money?"}] for number in range(64)]
    act("score 64 records", lambda: label_scores(lm, prompts, _LABELS, embeddings=True))
    act("evaluate 64 records", lambda: run_suite(lm, _records(prompts), SuiteConfig(), "main"))
    act("save", lambda: save_language_model(lm, out, dtype))
    lm = add_adapter(lm, LoraConfig())
    lm = act("merge an adapter", lambda: merge_adapter(lm, out / "adapter"))
    act("save in bfloat16", lambda: save_language_model(lm, out / "merged"))


def _transformers(act: Callable[[str, Callable[[], Any]], Any], dtype: str, model: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load() -> Any:
        AutoTokenizer.from_pretrained(model)
        return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    lm = act("load", load)
    act("forward pass", lambda: _forward(lm))
    act("save", lambda: lm.save_pretrained(out))


def _forward(model: Any) -> None:
    import torch

    with torch.inference_mode():
        model(input_ids=torch.arange(256)[None])


def _records(prompts: list[list[dict[str, str]]]) -> Any:
    import pyarrow as pa

    from posttrain.data.records.record import RECORD

    rows = [
        {
            "id": f"{row:020x}",
            "input_id": f"{row:020x}",
            "prompt": prompt,
            "completion": _LABELS[row % len(_LABELS)],
            "rejected": None,
            "text": None,
            "group": None,
            "source": "messages",
            "line": row,
            "meta": "{}",
        }
        for row, prompt in enumerate(prompts)
    ]
    return pa.Table.from_pylist(rows, schema=RECORD)


def _weight_bytes(model: Path, dtype: str) -> int:
    import math

    from posttrain.models.weight_files import read_headers

    count = sum(math.prod(header.shape) for header in read_headers(model).values())
    return count * (2 if dtype == "bfloat16" else 4)


def _status() -> dict[str, int]:
    """Return the bytes of this process by the names of /proc/self/status."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


if __name__ == "__main__":
    main()
