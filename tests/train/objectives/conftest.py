"""Rows with all inputs of the formulas, and objectives over the same few records."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from posttrain.models.tiny import write_tiny_model
from posttrain.testing.objectives import PreparedObjective, prepare_objective, records_of
from posttrain.train.data.config import RecordShape

VOCABULARY, WIDTH, TEACHER_WIDTH = 7, 5, 6


def rows(seed: int, n: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> dict[str, Tensor]:
    """N rows; ``scale`` is the distance of log-probabilities, logits and hidden states from 0."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Tensor] = {}
    for name in ("chosen", "rejected", "reference_chosen", "reference_rejected"):
        counts = rng.integers(1, 9, n)
        columns[f"{name}_counts"] = torch.from_numpy(counts)
        columns[name] = torch.from_numpy(-counts * rng.uniform(0.05, 3, n) * scale).to(dtype)
    columns["margin"] = torch.from_numpy(rng.uniform(0, 1, n)).to(dtype)
    columns["desirable"] = torch.from_numpy(rng.random(n) < 0.5)
    columns["targets"] = torch.from_numpy(rng.integers(0, VOCABULARY, n))
    for name, width in (("student", VOCABULARY), ("teacher", VOCABULARY), ("hidden", WIDTH)):
        columns[name] = torch.from_numpy(rng.normal(0, 2 * scale, (n, width))).to(dtype)
    columns["teacher_hidden"] = torch.from_numpy(rng.normal(0, scale, (n, TEACHER_WIDTH))).to(dtype)
    return columns


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., dict[str, Tensor]]:
    return rows


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher: another tiny model, wider and deeper, with the same tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("teacher"), seed=5, width=128, layers=3)


@pytest.fixture
def prepare(tiny_model: Path, other_model: Path, tmp_path: Path) -> Iterator[Callable[..., PreparedObjective]]:
    """``prepare(objective, settings)``: the objective and its model, which differs a little from the reference."""
    with ExitStack() as stack:

        def prepare_by_name(
            objective: str,
            settings: dict[str, Any] | None = None,
            *,
            teacher: str | Path | None = None,
            records: pa.Table | None = None,
            moved: bool = True,
        ) -> PreparedObjective:
            options = {"name": objective, **(settings or {})}
            if objective == "distill":
                options["teacher"] = str(teacher or other_model)
            train = {"objective": options}
            return stack.enter_context(prepare_objective(train, tmp_path, tiny_model, records, moved=moved))

        yield prepare_by_name


@pytest.fixture
def records_of_shape() -> Callable[[RecordShape], pa.Table]:
    """``records_of_shape("pair")``: eight records in that shape."""
    return records_of
