"""What fresh weights make of the training's own first examples, said before the first step."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import pack
from posttrain.store.files import write_atomically
from posttrain.train.config import TrainConfig
from posttrain.train.gradients import forward
from posttrain.train.initialization.variances import Variances, doubts, table, variances
from posttrain.train.lessons.base import Lesson
from posttrain.train.lessons.in_groups import in_groups
from posttrain.train.lessons.units import grouped

log = logging.getLogger("posttrain")

_SCALE = 1024.0  # of the loss, so that float16 can hold the gradients


def first_look(
    lm: LanguageModel,
    lesson: Lesson,
    config: TrainConfig,
    rows: Sequence[int],
    *,
    budget: int,
    padded: bool,
    file: Path,
) -> list[dict[str, Any]]:
    """Measure the variance of activations and gradients by layer on the first micro-batch, and log it as a table.

    A warning follows for each variance that is 0 or no number, or that changes from layer to layer by more than
    ``initialization.largest_ratio``.

    Args:
        rows: units of the first step.
        budget: tokens of a micro-batch at most.
        padded: whether the model needs padded rows.
        file: keeps what was found; what is there already is not measured again.

    Returns:
        ``layer``, ``activations`` and ``gradients`` of the embeddings and each layer.
    """
    if not file.exists():
        scale = _SCALE if config.precision == "float16" else 1.0

        def measured(part: Sequence[int]) -> list[Variances]:
            packed, first = pack([lesson.units[row] for row in part], lm.device, padded=padded), list(part)

            def loss() -> Tensor:
                whole = lesson.begin(lm, [first]) or 1.0
                return forward(lm, lesson, config, packed, first).sum * (scale / whole)

            return variances(lm, loss, scale)

        _, found = next(in_groups(lesson.units, grouped(lesson.units, rows, budget), measured))
        log.info("variance of activations and of gradients by layer, before the first step:\n%s", table(found))
        for doubt in doubts(found, config.initialization.largest_ratio):
            log.warning("  %s", doubt)
        write_atomically(file, json.dumps([one.to_json() for one in found]).encode())
    kept: list[dict[str, Any]] = json.loads(file.read_bytes())
    return kept
