"""The state of the loop as Prometheus reads it: ``GET /metrics``."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from posttrain.data.feedback.ingest import has_feedback
from posttrain.inspect.status import status
from posttrain.loop.drift import DriftValues
from posttrain.store.rows import CANARY_STATUSES
from posttrain.store.workspace import Workspace
from posttrain.web.access import LOOP, Site, least
from posttrain.web.api.bodies import ERRORS

_PREFIX = "posttrain_loop_"


class LoopCollector(Collector):
    """Reads the metrics from the workspace at each scrape; all names begin with ``posttrain_loop_``.

    A family has at least one sample: NaN for what was not measured yet.
    """

    def __init__(self, site: Site) -> None:
        self._site = site

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics; none in a folder without a config."""
        site = self._site
        if site.config is None:
            return
        state = status(site.workspace, site.config)
        rounds, champion = state["rounds"], state["champion"]
        finished = [entry for entry in rounds if entry["status"] == "done"]
        yield _gauge("round", "Number of the round in progress, or of the last one", state["round"])
        yield _gauge("working", "1 while a process works on the loop", state["working"])
        yield _gauge("waiting", "1 while the loop waits for labels, records or a trigger", state["waiting"] is not None)
        yield _gauge("labels", "Labels in the last training set", finished[-1]["labels"] if finished else 0)
        yield _gauge(
            "round_seconds", "Seconds of the last finished round", finished[-1]["seconds"] if finished else None
        )
        yield _gauge("champion_round", "Round that trained the model in service", champion and champion["round"])
        yield _gauge(
            "champion_damaged", "1 if files of the model in service are damaged", champion and bool(champion["damage"])
        )
        metrics = GaugeMetricFamily(f"{_PREFIX}champion_metric", "Metric of the model in service", labels=["name"])
        for name, value in (champion["metrics"] if champion else {}).items():
            metrics.add_metric([name], value)
        if metrics.samples:
            yield metrics
        drift = GaugeMetricFamily(f"{_PREFIX}drift", "Drift of the last round's new inputs", labels=["name"])
        measured = (finished[-1]["drift"] if finished else None) or {}
        # Also of a round with too few new inputs: a rule on a series that is missing does not say so.
        for name in (field.name for field in fields(DriftValues)):
            value = measured.get(name)
            drift.add_metric([name], math.nan if value is None else value)
        yield drift
        decisions = CounterMetricFamily(
            f"{_PREFIX}decisions", "Finished rounds by the gate's decision", labels=["action"]
        )
        for action in ("deploy", "refuse", "rollback"):
            decisions.add_metric([action], sum(entry["decision"] == action for entry in finished))
        yield decisions
        yield from _canary_metrics(site.workspace)
        items = GaugeMetricFamily(f"{_PREFIX}queue_items", "Items of open batches", labels=["status"])
        batches = [site.queue.progress(batch.name) for batch in site.queue.batches("open")]
        for name in ("open", "review", "done", "dropped"):
            items.add_metric([name], sum(getattr(batch, name) for batch in batches))
        yield items
        inbox = site.workspace.home / "inbox"
        yield _gauge(
            "feedback_waiting", "1 if the inbox holds feedback that the loop has not taken in", has_feedback(inbox)
        )


def _canary_metrics(workspace: Workspace) -> Iterable[Metric]:
    """Yields the canaries by what became of them; of the one that runs, or of the last one, each arm's outcomes."""
    canaries = workspace.metadata.canaries()
    counts = Counter(canary.status for canary in canaries)
    total = GaugeMetricFamily(f"{_PREFIX}canaries", "Canaries by their status", labels=["status"])
    for status_name in CANARY_STATUSES:
        total.add_metric([status_name], counts[status_name])
    yield total
    if not canaries:
        return
    share = GaugeMetricFamily(f"{_PREFIX}canary_share", "Share of the requests, 0 once it ended", labels=["arm"])
    outcomes = GaugeMetricFamily(
        f"{_PREFIX}canary_outcomes", "Outcomes that counted in the last judgement", labels=["arm", "outcome"]
    )
    canary = canaries[-1]
    part = canary.share if canary.status == "running" else 0.0
    judgement = canary.detail.get("judgement")
    for arm, arm_share in (("canary", part), ("champion", 1 - part)):
        share.add_metric([arm], arm_share)
        judged = judgement[arm] if judgement else {"good": 0, "total": 0}
        outcomes.add_metric([arm, "good"], judged["good"])
        outcomes.add_metric([arm, "bad"], judged["total"] - judged["good"])
    yield share
    yield outcomes


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    # NaN for what there is not yet: 0 would look like a measurement.
    return GaugeMetricFamily(f"{_PREFIX}{name}", text, value=math.nan if value is None else float(value))


def metrics_routes(site: Site) -> APIRouter:
    """Returns the route; Prometheus sends a token of an account, as every program does."""
    router = APIRouter()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LoopCollector(site))

    @router.get("/metrics", **least(LOOP), response_class=PlainTextResponse, responses=ERRORS)
    def metrics() -> Response:
        """Returns the state of the loop in the format of Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
