"""The strategies by name.

Every strategy is ``strategy(pool, n, seed, **options) -> int64 rows`` for 0 < n <= free rows, best first: ``n`` of them
unless an option bounds them.
"""

from collections.abc import Callable

from posttrain.select.selectors.badge import badge
from posttrain.select.selectors.closeness import Rows
from posttrain.select.selectors.clustered import diverse, uncertain_diverse
from posttrain.select.selectors.composite import composite, mmr
from posttrain.select.selectors.cost import cost_aware
from posttrain.select.selectors.density import density_weighted
from posttrain.select.selectors.facility import facility_location
from posttrain.select.selectors.k_center import k_center
from posttrain.select.selectors.prob_cover import prob_cover
from posttrain.select.selectors.stratified import stratified
from posttrain.select.selectors.top import entropy, least_confidence, margin, random, top
from posttrain.select.selectors.typiclust import typiclust

Strategy = Callable[..., Rows]

STRATEGIES: dict[str, Strategy] = {
    "random": random,
    "entropy": entropy,
    "least_confidence": least_confidence,
    "margin": margin,
    "top": top,
    "diverse": diverse,
    "uncertain_diverse": uncertain_diverse,
    "k_center": k_center,
    "facility_location": facility_location,
    "mmr": mmr,
    "composite": composite,
    "density_weighted": density_weighted,
    "badge": badge,
    "prob_cover": prob_cover,
    "typiclust": typiclust,
    "stratified": stratified,
    "cost_aware": cost_aware,
}

COVER_THE_POOL = ("diverse", "typiclust", "prob_cover", "k_center", "facility_location")
"""The strategies that go by where records lie, and by doubts at most for how much a neighbourhood is worth.

They choose as well where neighbours speak for most records (see `posttrain.select.unasked`). Those that rank records
by doubt do not: a mean of several doubts is seldom a great one, so that hardly any of those would be chosen."""

FIT_FOR_COLD_START = ("random", *COVER_THE_POOL)
"""The strategies that ask nothing of the model's answers, which say nothing before it is trained."""
