"""``posttrain train`` in Python: a model and files of records in, a folder with what was trained out."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.reading.data_files import display_path, to_data_path
from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.models.sources import fetch_once, locate
from posttrain.train.objectives.registry import objective_spec as check_objective
from posttrain.train.standalone import TrainJobConfig, train_standalone


def train(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    objective: str | None = None,
    settings: Mapping[str, Any] | None = None,
    fork: bool = False,
) -> dict[str, Any]:
    """Trains a model on records, resuming where an earlier call stopped.

    Args:
        model: a folder, a .gguf file, a Hub id, ``smollm2-135m`` or ``tiny``.
        data: a file of records, its URL, or a Hugging Face dataset folder, or several of them.
        out: gets the model in Hugging Face layout, ``config.yaml`` with every value, ``metrics.jsonl`` with one line an
            optimiser step, and ``summary.json``.
        objective: such as ``dpo``; None: that of ``settings``, or ``sft``.
        settings: other keys of a config file, such as ``{"seed": 1, "train": {"epochs": 3}}``. Paths are relative
            to the current folder.
        fork: resume although settings, data or code have changed since.

    Returns:
        The summary: counts and losses of `posttrain.train.stage.train`, and the final ``micro_batch_tokens``.

    Raises:
        UserError: a setting, the model or a record cannot be used, the folder holds something else, another process
            trains into it, or settings, data or code have changed since the training began.
        WorkError: training fails and cannot be recovered.
    """
    files = str(data) if isinstance(data, str | Path) else [str(file) for file in data]
    values = {**(settings or {}), "model": str(model), "data": files}
    if objective is not None:
        # Checked alone first: the config's own error would name the key train.objective.
        check_objective(objective, "objective")
        values["train"] = {**values.get("train", {}), "objective": objective}
    config = TrainJobConfig.read(values, "settings")
    config = config.with_paths_from(lambda key: Path())
    source = locate(config.model, Path(), weights=config.train.initialization.method == "none")
    return train_standalone(Path(out), config, read_files(config), partial(fetch_once, source), fork=fork)


def read_files(config: TrainJobConfig) -> pa.Table:
    """Reads the records of the config's files; errors name them by their paths from the current folder.

    Raises:
        UserError: on the first bad record, with file and line.
    """
    tables: list[pa.Table] = []
    for path in map(to_data_path, config.files):
        tables += read(path, config.columns, name=display_path(path, Path.cwd()))
    return concat(tables)
