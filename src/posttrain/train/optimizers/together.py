"""Several optimisers behind one interface."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer


class Together(Optimizer):
    """Optimisers of different parameters as one: one list of groups, one state, one step.

    The parts look at this object's own groups and state, so that a rate set here, or a state loaded here, is theirs.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # ends load_state_dict, with fresh groups and state
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state
