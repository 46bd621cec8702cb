"""Influence of training records by gradients: influence functions, TracIn, TRAK and LESS.

Throughout, a score is positive where training on the record helps: it lowers the test record's loss.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.store.extensions import Registry

if TYPE_CHECKING:
    from posttrain.attribution.influence.functional_model import FunctionalModel
    from posttrain.attribution.values import InfluenceScores


class InfluenceMethod(Protocol):
    """An influence method whose settings are chosen, so that it needs the trained model and the records alone."""

    def __call__(
        self,
        model: "FunctionalModel",
        train: Sequence[Any],
        test: Sequence[Any],
        *,
        learning_rate: float,
        folder: Path,
    ) -> "InfluenceScores":
        """Computes the influence of training records on test records.

        Args:
            model: the trained model and the loss.
            train: N training records.
            test: M test records.
            learning_rate: of the training; the methods that sum over its steps use it.
            folder: caches gradients and solutions, so that a killed call resumes.
        """
        ...


_HERE = "posttrain.attribution.influence"

INFLUENCE_METHODS: Mapping[str, InfluenceMethod] = Registry(
    "influence method",
    "posttrain.influence_methods",
    {
        "ekfac": f"{_HERE}.influence_functions:final_ekfac",
        "conjugate_gradient": f"{_HERE}.influence_functions:final_conjugate_gradient",
        "tracin": f"{_HERE}.tracin:final_tracin",
        "trak": f"{_HERE}.trak:final_trak",
        "less": f"{_HERE}.tracin:final_less",
    },
)
"""Methods by name, with settings for a handful of test records and the final weights only."""
