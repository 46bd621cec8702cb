"""Measures the speed of scoring every label of a closed set with the label trie, against a plain batched loop.

    python benchmarks/label_scoring.py --model DIR --data FILE.csv --labels labels.txt [--records 32] [--repeats 3]
        [--dtype bfloat16] [--tolerance 1e-2]

The plain loop uses transformers alone: it computes the full logits of every prompt with every label as one padded row,
and sums the labels' log-probabilities. Both run in turn in one process; the table gives the median seconds, the median
ratio, and the largest differences between the two results.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import label_scores
from posttrain.models.task import TaskConfig, Turns

_BATCH_ROWS = 64


@torch.inference_mode()
def plain_loop(lm: LanguageModel, prompts: list[Turns], labels: list[str]) -> np.ndarray:
    """Compute log-probabilities [N, K], normalised over the labels, with one padded row for each prompt and label."""
    answers = [lm.answer_ids(label) for label in labels]
    rows = [(lm.prompt_ids(prompt), answer) for prompt in prompts for answer in answers]
    totals = np.zeros(len(rows))
    for start in range(0, len(rows), _BATCH_ROWS):
        batch = rows[start : start + _BATCH_ROWS]
        width = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids = torch.tensor([[*prompt, *answer] + [0] * (width - len(prompt) - len(answer)) for prompt, answer in batch])
        mask = torch.tensor([[1] * (len(p) + len(a)) + [0] * (width - len(p) - len(a)) for p, a in batch])
        logits = lm.model(input_ids=ids, attention_mask=mask).logits.float().log_softmax(-1)
        for row, (prompt, answer) in enumerate(batch):
            positions = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
            totals[start + row] = logits[row, positions, torch.tensor(answer)].double().sum()
    scores = totals.reshape(len(prompts), len(labels))
    return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)


def main() -> None:
    """Time both methods and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--column", default="text")
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--system", default="Name the intent of the message.")
    parser.add_argument("--records", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--tolerance", type=float, default=1e-2, help="tolerance of `label_scores`; 0: score all labels to the end"
    )
    arguments = parser.parse_args()
    lm = load_language_model(arguments.model, TaskConfig(system=arguments.system), arguments.dtype)
    with arguments.data.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    step = max(1, len(rows) // arguments.records)
    prompts = [[{"role": "user", "content": row[arguments.column]}] for row in rows[::step][: arguments.records]]
    labels = arguments.labels.read_text(encoding="utf-8").split()
    our_seconds: list[float] = []
    plain_seconds: list[float] = []
    label_scores(lm, prompts[:2], labels)
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        scores = label_scores(lm, prompts, labels, tolerance=arguments.tolerance).log_probabilities
        our_seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        reference = plain_loop(lm, prompts, labels)
        plain_seconds.append(time.perf_counter() - start)
    ratio = statistics.median(p / o for p, o in zip(plain_seconds, our_seconds, strict=True))
    difference = np.abs(np.exp(scores.astype(np.float64)) - np.exp(reference)).max()
    log_difference = np.abs(scores - reference).max()
    columns = ("precision", "tolerance", "records", "labels", "ours, s", "plain loop, s", "ratio")
    print("| " + " | ".join((*columns, "a probability is off by", "a log-probability by")) + " |")
    print("| --- " * (len(columns) + 2) + "|")
    cells = (arguments.dtype, f"{arguments.tolerance:g}", len(prompts), len(labels))
    times = (f"{statistics.median(our_seconds):.2f}", f"{statistics.median(plain_seconds):.2f}", f"{ratio:.1f}")
    print("| " + " | ".join(map(str, (*cells, *times, f"{difference:.1e}", f"{log_difference:.1e}"))) + " |")


if __name__ == "__main__":
    main()
