"""What tests of searches of trainings share."""

import json
from pathlib import Path

import pytest
from tune_records import HELD_OUT


@pytest.fixture
def held_out_folder(tmp_path: Path) -> Path:
    """A folder with the file of held-out records."""
    held_out = [
        {"prompt": row["prompt"][-1]["content"], "completion": row["completion"]} for row in HELD_OUT.to_pylist()
    ]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    return tmp_path
