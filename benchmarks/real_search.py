"""Searches LoRA's settings for SmolLM2-135M on Banking77 for 30 minutes, with and without what an earlier round found.

    python benchmarks/real_search.py FOLDER --data DIR [--model smollm2-135m] [--budget 30m] [--intents 10]
        [--messages 8 16] [--epochs 3] [--picture FILE]

As two rounds of a loop have it: the second has twice the labels. ``round 1`` is a study of the first round's data.
``cold`` and ``warm`` are studies of the second round's, ``warm`` from ``round 1``. All three are ``posttrain tune``
with the ready spaces `optimizer` and `lora`, a Gaussian process and ASHA. ``defaults`` is one training with the
config's own settings. The best model of each is measured on test messages. ``reaches`` is the share of its budget
that ``warm`` had spent when its best was as good as the best of ``cold``. The same command resumes. Nothing else
should run beside it: the budget is a time, unless it is given in tokens.
"""

import argparse
import json
import math
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from banking77_messages import answer, draw_intents, draw_messages, write_records
from curve_pictures import save_chart
from hard_negatives import precision_for
from population_schedules import measure

from posttrain.report.charts.chart import Chart, series_colour, ticks, value_axis
from posttrain.store.files import write_atomically

HELD_OUT = 6  # messages of each intent


def write_config(folder: Path, options: argparse.Namespace, number: int, **tune: Any) -> Path:
    """Writes the config of a study of a round's data; returns its path."""
    config = {
        "model": options.model,
        "data": str(options.folder.absolute() / f"train-{number}.jsonl"),
        "task": {"labels": [answer(intent) for intent in draw_intents(options.data, options.intents)]},
        "train": {"method": "lora", "epochs": options.epochs, "precision": precision_for(options.folder)},
        "tune": {
            "space": ["optimizer", "lora"],
            "held_out": str(options.folder.absolute() / "held_out.jsonl"),
            "sampler": "gp",
            "scheduler": {"name": "asha", "max_resource": 3},
            "budget": options.budget,
            **tune,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tune.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def run(*command: str | Path) -> None:
    """Runs a posttrain command."""
    subprocess.run([sys.executable, "-m", "posttrain", *map(str, command)], check=True)


def search(folder: Path, config: Path, test: Path) -> dict[str, Any]:
    """Runs a study, trains with its best settings, and measures that model; unless both are done."""
    file = folder / "result.json"
    if not file.exists():
        study = folder / "study"
        run("tune", config, "--out", study)
        run("train", "--config", study / "best.yaml", "--out", folder / "model")
        trials = [json.loads(line) for line in (study / "trials.jsonl").read_text().splitlines()]
        spent = list(accumulate(trial["seconds"] for trial in trials))
        values = [min((report[1] for report in trial["reports"]), default=float("inf")) for trial in trials]
        row = {
            "trials": len(trials),
            "finished": sum(trial["state"] == "finished" for trial in trials),
            "tokens": sum(trial["tokens"] for trial in trials),
            "spent": spent,
            "best": list(accumulate(values, min)),
            **measure(folder / "model", yaml.safe_load(config.read_text()), test),
        }
        write_atomically(file, json.dumps(row).encode())
    return dict(json.loads(file.read_text()))


def defaults(folder: Path, config: Path, test: Path) -> dict[str, Any]:
    """Trains with the config's own settings, and measures that model."""
    file = folder / "result.json"
    if not file.exists():
        values = yaml.safe_load(config.read_text())
        del values["tune"]
        config.write_text(yaml.safe_dump(values, sort_keys=False))
        run("train", "--config", config, "--out", folder / "model")
        write_atomically(file, json.dumps(measure(folder / "model", values, test)).encode())
    return dict(json.loads(file.read_text()))


def draw_searches(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws the least held-out loss of the second round's studies by the minutes that their trials have taken."""
    series: list[dict[str, object]] = []
    most = max(row["spent"][-1] for row in results.values()) / 60
    for rank, (name, row) in enumerate(results.items()):
        points = [(seconds / 60, value) for seconds, value in zip(row["spent"], row["best"], strict=True)]
        line = {"type": "line", "name": name, "step": "end", "symbol": "none", "data": points}
        series.append({**line, "color": series_colour(rank), "lineStyle": {"color": series_colour(rank), "width": 2}})
    option = {
        "xAxis": {"type": "value", "min": 0, "max": math.ceil(most), "name": "minutes", "nameLocation": "middle"},
        "yAxis": value_axis(ticks(0, 1, 5), "{:.1f}".format),
        "tooltip": {"trigger": "axis"},
        "legend": {"data": list(results)},
        "series": series,
    }
    rows = [(name, f"{row['best'][-1]:.3f}") for name, row in results.items()]
    title = "Least held-out loss by minutes of search, with and without the study of the round before"
    save_chart(Chart(title, option, 400, ("study", "best"), rows), path, 860)


def main() -> None:
    """Runs the studies, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of banking77_train.csv and banking77_test.csv")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--budget", default="30m")
    parser.add_argument("--intents", type=int, default=10)
    parser.add_argument("--messages", nargs=2, type=int, default=(8, 16), help="of each intent, in both rounds")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--test", type=int, default=20, help="test messages of each intent")
    parser.add_argument("--picture", type=Path, help="SVG file of the curves")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    intents = draw_intents(options.data, options.intents)
    train, test = (draw_messages(options.data, intents, name) for name in ("train", "test"))
    write_records(options.folder / "held_out.jsonl", [row for rows in train.values() for row in rows[:HELD_OUT]])
    write_records(options.folder / "test.jsonl", [row for rows in test.values() for row in rows[: options.test]])
    for number, count in enumerate(options.messages, 1):
        rows = [row for rows in train.values() for row in rows[HELD_OUT : HELD_OUT + count]]
        write_records(options.folder / f"train-{number}.jsonl", rows)
    file = options.folder / "test.jsonl"
    results = {}
    for name, number, settings in (
        ("round 1", 1, {}),
        ("cold", 2, {}),
        ("warm", 2, {"warm_start": str(options.folder.absolute() / "round-1" / "study")}),
    ):
        folder = options.folder / name.replace(" ", "-")
        results[name] = search(folder, write_config(folder, options, number, **settings), file)
    folder = options.folder / "defaults"
    results["defaults"] = defaults(folder, write_config(folder, options, 2), file)
    print("\n| study | trials | finished | tokens | best held-out loss | test loss | test accuracy |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, row in results.items():
        counts = [f"{row[key]:,}" if key in row else "" for key in ("trials", "finished", "tokens")]
        best = f"{row['best'][-1]:.3f}" if "best" in row else ""
        cells = [name, *counts, best, f"{row['loss']:.3f}", f"{row['accuracy']:.1%}"]
        print(f"| {' | '.join(cells)} |")
    cold, warm = results["cold"], results["warm"]
    reached = next((index for index, value in enumerate(warm["best"]) if value <= cold["best"][-1]), None)
    share = "never" if reached is None else f"{warm['spent'][reached] / warm['spent'][-1]:.0%} of its compute"
    print(f"\nwarm reaches the best of cold after: {share}")
    if options.picture:
        draw_searches({"cold": cold, "warm": warm}, options.picture)


if __name__ == "__main__":
    main()
