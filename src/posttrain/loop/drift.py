"""Drift: how far inputs that are new since the last round lie from those that it knew."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from pydantic import Field

from posttrain.data.report.distribution import Distribution, DistributionBuilder
from posttrain.data.report.drift_measures import (
    LARGE,
    MODERATE,
    PopulationStability,
    category_stability,
    mean_discrepancy,
    population_stability,
)
from posttrain.store.message import Message
from posttrain.store.section import Section

VALUE_NAMES = {
    "drift.psi": "population stability index of new inputs over clusters of known ones, above what chance gives",
    "drift.mmd": "squared maximum mean discrepancy between the embeddings of new and known inputs",
    "drift.mmd_p": "its p-value: the chance of such a discrepancy without drift",
    "drift.confidence": "population stability index of the champion's confidence on new inputs, above chance",
}
"""Names of values in the rules of triggers and gates; they are not numbers while there are too few new inputs."""

CONFIDENCE = "drift.confidence"

_CLUSTERS = 10
_LEAST_IN_CLUSTER = 10
_CLUSTER_STARTS = 4


class DriftConfig(Section):
    """The comparison of inputs that are new since the last round with those that it knew."""

    embedder: str | None = Field(
        "minilm",
        description="Sentence model that embeds inputs, as a folder, a Hub id or `minilm`; null, or where it is not "
        "installed: counts of hashed character n-grams.",
    )
    least: int = Field(30, ge=10, description="Fewer new inputs than this are not compared.")
    compared: int = Field(1000, ge=100, description="New and known inputs that are compared, at most so many of each.")


@dataclass(frozen=True)
class DriftValues:
    """Drift of new inputs; NaN where it is not measured.

    Attributes:
        new: Number of new inputs; ``known`` of those that the last round knew.
        psi, mmd, mmd_p, confidence: As in `VALUE_NAMES`.
    """

    new: int
    known: int
    psi: float = math.nan
    mmd: float = math.nan
    mmd_p: float = math.nan
    confidence: float = math.nan

    @property
    def values(self) -> dict[str, float]:
        """Returns the values by their names in rules."""
        return {name: getattr(self, name.removeprefix("drift.")) for name in VALUE_NAMES}

    def as_dict(self) -> dict[str, float | None]:
        """Returns the fields for JSON, NaN as None."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, fields: dict[str, float | None]) -> "DriftValues":
        """Reads the fields of `as_dict`."""
        return cls(**{name: math.nan if value is None else value for name, value in fields.items()})  # type: ignore[arg-type]


def drift_sentence(fields: Mapping[str, float | None]) -> Message:
    """Says in a line how far new inputs lie from known ones; fields as in `DriftValues.as_dict`, measured."""
    psi = fields["psi"]
    assert psi is not None
    values = f"drift.psi {psi:.2f}, drift.mmd_p {fields['mmd_p']:.2g}"
    values += "" if fields["confidence"] is None else f", drift.confidence {fields['confidence']:.2f}"
    template = "large drift of {new} new inputs: {values}"
    if psi < LARGE:
        template = "moderate drift of {new} new inputs: {values}"
    if psi < MODERATE:
        template = "little drift of {new} new inputs: {values}"
    return Message(template, new=fields["new"], values=values)


Matrix = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]


def cluster_drift(known: Matrix, new: Matrix, seed: int) -> float:
    """Computes the population stability index of new inputs over clusters of known ones, less its mean under no drift.

    The clusters are of one half of the known inputs, and the shares of the other half are compared with those of the
    new ones: clusters fit the inputs that they were made of better than others of the same distribution.

    Args:
        known: float32 [N, D], at least 20 embeddings.
        new: float32 [M, D].
    """
    from sklearn.cluster import KMeans

    order = np.random.default_rng(seed).permutation(len(known))
    first, second = known[order[: len(known) // 2]], known[order[len(known) // 2 :]]
    # So few that each holds enough: an empty one counts more than any real change.
    count = min(_CLUSTERS, max(2, min(len(new), len(second)) // _LEAST_IN_CLUSTER), len(np.unique(first, axis=0)))
    clusters = KMeans(count, n_init=_CLUSTER_STARTS, random_state=seed % 2**32).fit(first)
    counts = [np.bincount(clusters.predict(part), minlength=count) for part in (second, new)]
    return _above_chance(category_stability("clusters", *counts))


def confidence_drift(known: Vector, new: Vector) -> float:
    """Computes the population stability index of confidences over the deciles of known ones, less its mean by chance.

    Args:
        known: float64 [N], the champion's confidence on known inputs.
        new: float64 [M].
    """
    return _above_chance(population_stability("confidence", _distribution(known), _distribution(new)))


def embedding_drift(known: Matrix, new: Matrix, seed: int) -> tuple[float, float]:
    """Computes the squared maximum mean discrepancy of embeddings [N, D] and [M, D], and its p-value."""
    result = mean_discrepancy(known, new, seed=seed)
    return result.squared, result.p_value


def _above_chance(stability: PopulationStability) -> float:
    # The usual marks of 0.1 and 0.25 are for large samples: 40 new inputs have 0.25 by chance.
    return stability.index - stability.by_chance


def _distribution(values: Vector) -> Distribution:
    builder = DistributionBuilder()
    builder.add(values)
    return builder.distribution()
