"""Fill a batch's label column from answers.csv, as a person would in a spreadsheet.

fill.py support/labels/round-1.csv
"""

import csv
import sys
from pathlib import Path

batch = Path(sys.argv[1])
with (Path(__file__).parent / "answers.csv").open(encoding="utf-8", newline="") as file:
    answers = {row["text"]: row["label"] for row in csv.DictReader(file)}
with batch.open(encoding="utf-8", newline="") as file:
    rows = list(csv.DictReader(file))
with batch.open("w", encoding="utf-8", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows({**row, "label": answers[row["prompt"]]} for row in rows)
