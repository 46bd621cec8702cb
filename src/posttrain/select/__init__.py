"""Choose what to label, what to train on and in which order.

A strategy (`selectors/`) gets a `Pool`: all rows of the score table, some with a label. It never chooses those, and
strategies that cover the pool count what they cover already. `scores/` has the table and its columns; finished scores
lie apart from artifacts, in chunks by model and settings, under the record's content, so that a grown pool is scored
only where it is new. `batch.py` composes a round's batch; `batch_strategy` in
`strategy.py` decides what it is chosen by.

Two engines serve a million rows, exact and lazy, since a row's value only shrinks while rows are chosen: greedy choice
(facility location and MMR) and draws by squared distance (BADGE).
"""

from typing import TYPE_CHECKING

from posttrain.store.extensions import lazy_exports

if TYPE_CHECKING:
    from posttrain.select.selectors.registry import select

__all__ = ["select"]

__getattr__ = lazy_exports(__name__, {"select": "selectors.registry"})
