"""Choose what to label, what to train on and in which order.

A strategy (`selectors/`) gets a `Pool`: all rows of the score table, some with a label. It never chooses those, and
strategies that cover the pool count what they cover already. `scores/` has the table and its columns; finished scores
lie apart from artifacts, in chunks by model and settings, under the record's content, so that a grown pool is scored
only where it is new. `batch.py` composes a round's batch; `strategy.py` decides where the config names no strategy.

Three engines serve a million rows, exact and lazy, since a row's value only shrinks while rows are chosen:
farthest-first (by distance to the nearest chosen row), coverage (submodular gains), and draws by squared distance.
"""

from typing import TYPE_CHECKING

from posttrain.store.extensions import lazy_exports

if TYPE_CHECKING:
    from posttrain.select.selectors.registry import select

__all__ = ["select"]

__getattr__ = lazy_exports(__name__, {"select": "selectors.registry"})
