"""Prunes the initial model of a training."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.models.importance import importance_by_activation
from posttrain.models.loading import check_loadable, load_config
from posttrain.models.packing import Unit
from posttrain.models.pruning import check_pruning, choose_parts, prune_model
from posttrain.models.task import TaskConfig
from posttrain.store.files import disk_errors, make_folder, remove_tree, sync_tree
from posttrain.store.hashing import digest
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.build import load_model
from posttrain.train.shape import PRUNE_SECTION, pruned_size

log = logging.getLogger("posttrain")

_REPORT = "pruning.json"


def pruned_base(
    source: Path, units: Sequence[Unit], config: TrainConfig, task: TaskConfig, seed: int, scratch: Path
) -> Path:
    """Returns the folder of the pruned model, which is made once and kept for the training to resume from.

    A model that has the size already is returned as it is.

    Args:
        source: folder of the model to prune.
        units: the training set, of which a random sample measures importance.
        config: settings of the training.
        task: its task.
        seed: seed of the sample.
        scratch: folder of everything that the training resumes from.

    Raises:
        UserError: the model cannot be pruned to this size.
    """
    size, described = pruned_size(config.prune), load_config(str(source))
    if check_pruning(described, size, PRUNE_SECTION).to_dict() == described.to_dict():
        return source
    # By its settings: a training that is resumed with others must not continue with this model unnoticed.
    folder = scratch / f"pruned-{digest(config.prune.model_dump(mode='json'))[:12]}"
    if folder.exists():
        return folder
    lm = load_model(config, source, task, config.dtype)
    count = min(config.prune.records, len(units))
    rows = np.sort(np.random.default_rng(seed).choice(len(units), count, replace=False)).tolist()
    importance = importance_by_activation(lm, [sequence for row in rows for sequence in units[row]])
    before, weights = lm.model.config, lm.model.num_parameters()
    kept = choose_parts(importance, before, size)
    prune_model(lm.model, kept)
    after = lm.model.config
    report = {
        "records": count,
        "block_influence": importance.layers.tolist(),
        "layers": kept.layers,
        "key_value_heads": kept.groups,
        "parameters": [weights, lm.model.num_parameters()],
    }
    for name in ("num_hidden_layers", "num_attention_heads", "intermediate_size"):
        report[name] = [getattr(before, name), getattr(after, name)]
    removed = sorted(set(range(before.num_hidden_layers)).difference(kept.layers))
    log.info(
        "  pruned by %d records: %d of %d layers%s, %d of %d heads, %d of %d channels stay; %s of %s weights",
        *(count, after.num_hidden_layers, before.num_hidden_layers),
        f" (without {', '.join(map(str, removed))})" if removed else "",
        *(after.num_attention_heads, before.num_attention_heads),
        *(after.intermediate_size, before.intermediate_size),
        *(f"{number:,}" for number in reversed(report["parameters"])),
    )
    # Renamed when it is whole and on the disk: a kill leaves no folder that looks complete.
    unfinished = folder.with_name(f"{folder.name}.part")
    with disk_errors(folder):
        remove_tree(unfinished)
        make_folder(unfinished)
        lm.model.save_pretrained(unfinished)
        lm.tokenizer.save_pretrained(unfinished)
        check_loadable(unfinished)
        (unfinished / _REPORT).write_text(json.dumps(report), encoding="utf-8")
        sync_tree(unfinished)
        unfinished.rename(folder)
    return folder


def pruning_report(folder: Path) -> dict[str, Any] | None:
    """Returns what was measured and kept, of a folder that `pruned_base` has returned, as JSON values; None if all is.

    They are ``records``, ``block_influence`` of all layers, ``layers`` that are kept, in each of them
    ``key_value_heads``, and before and after ``parameters`` and the numbers of the config.
    """
    file = folder / _REPORT
    return json.loads(file.read_bytes()) if file.exists() else None
