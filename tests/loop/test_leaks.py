"""What the test set measures on is not learned from, whichever steps the config lists."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import UserError

Open = Callable[[Path], Any]
BY_HAND = {"steps": ["exact", "conflicts"]}
LONG = "and the letter says that I should ask you about it before the end of the week"


def leaking(small: Any, ends: str, pool: int = 12, **changes: Any) -> Path:
    """A workspace whose test file ends in a message of the pool's first 12, but for the last word."""
    root: Path = small(**changes)
    rows = small.rows()
    rows[:12] = [{**row, "text": f"{row['text']} {LONG}"} for row in rows[:12]]
    small.write(root / "pool.csv", rows[:pool], ["text"])
    small.write(root / "answers.csv", rows)
    small.write(root / "test.csv", [*rows[60:80], {**rows[3], "text": rows[3]["text"].replace("week", ends)}])
    return root


def test_an_equal_input_is_refused_before_any_work(small: Any, turned: Open) -> None:
    root = leaking(small, "week", data=BY_HAND)
    loop = turned(root)
    says = r"^data\.steps: 1 training record has an input that .*pool\.csv:5 and test\.csv:22; .*`decontaminate`"
    with pytest.raises(UserError, match=says):
        loop.run()
    assert [run.stage for run in loop.metadata.runs()] == ["collect pool"]
    small.configure(root)
    loop.run(0)


def test_a_shared_run_of_words_is_refused_before_training(small: Any, turned: Open) -> None:
    root = leaking(small, "month", data=BY_HAND)
    loop = turned(root)
    with pytest.raises(UserError, match=r"^the training set of round 1: 12 records of train give test away") as error:
        loop.run()
    assert "pool.csv:" in str(error.value)
    assert "(test): " in str(error.value)
    assert loop.stages("failed") == ["1 train"]
    assert not [run for run in loop.metadata.runs() if run.stage == "train" and run.output]


def test_the_default_steps_let_the_same_files_train(small: Any, turned: Open) -> None:
    loop = turned(leaking(small, "month", pool=60, data={"steps": [*BY_HAND["steps"], "decontaminate"]}))
    loop.run(1)
    assert loop.stages("failed") == []
