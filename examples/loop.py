"""The whole loop in Python, as in a notebook: python examples/loop.py FOLDER (a new one; `loop` by default)."""

# %% A workspace: a folder with your files and a config. The tiny model shows the mechanics, and learns little.
import csv
import shutil
import sys
from pathlib import Path

import posttrain

files = Path(posttrain.__file__).parent / "cli" / "example"  # those of `posttrain init --example`
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "loop")
shutil.copytree(files, folder, ignore=shutil.ignore_patterns("posttrain.yaml"))
config = {
    "model": "tiny",
    "rounds": 2,
    "task": {"system": "Name the intent of the message.", "labels": "labels.txt"},
    "data": {"pool": "inputs.csv", "test": "test.csv", "columns": {"prompt": "text", "completion": "label"}},
    "label": {"annotator": "people", "per_round": 16},
    "train": {"epochs": 40, "learning_rate": 2e-3, "precision": "float32"},
    "evaluate": {"latency": {"prompts": 0}},
    "gate": {"deploy": ["gain.accuracy.low > 0"]},
}
workspace = posttrain.Workspace.create(folder, config)

# %% Run until labels are needed, give them, and run on. Here a file answers; ask people, or a model, in its place.
with (files / "answers.csv").open(encoding="utf-8") as file:
    answers = {row["text"]: row["label"] for row in csv.DictReader(file)}
while waiting := workspace.run():
    labels, records = workspace.label(lambda record: answers[record["input"]])
    print(f"{waiting.partition(':')[0]}: {labels} of {records}")

# %% What came of it: the gate's decision on each round, and the model in service.
for entry in workspace.status()["rounds"]:
    print(f"round {entry['round']}: accuracy {entry['metrics']['accuracy']:.3f}, {entry['decision']}")
model, tokenizer = workspace.models.load("champion")

# %% Back to the model before, at once.
print("rolled back to", workspace.models.rollback(reason="an example"))
