"""The pages of the loop: dashboard, rounds, training runs, records, lineage and models."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from posttrain.data.versions.version import Version
from posttrain.inspect.show import REJECTED, search_records, show
from posttrain.inspect.system_use import SystemMonitor
from posttrain.loop.config import Config
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.record import read_rounds
from posttrain.loop.round import known_steps
from posttrain.loop.stage import RoundStep
from posttrain.loop.stages.collect import Collect
from posttrain.loop.state import RoundState
from posttrain.models.task import record_turns
from posttrain.report.charts.bars import format_seconds
from posttrain.report.formatting import bytes_text, metric_name, metric_text
from posttrain.report.section import Section, Tiles
from posttrain.store.errors import DamagedArtifactError, UserError, is_user_mistake, shorten
from posttrain.train.curves import read_round_training
from posttrain.train.report import headline as training_headline
from posttrain.train.report import loss_chart, training_blocks
from posttrain.web.access import LOOP, Principal, Site
from posttrain.web.app_page import add_to_navigation, app_page, page_access
from posttrain.web.lineage import lineage_section
from posttrain.web.loop_report import (
    decisions_section,
    headline,
    learning_curve,
    read_loop,
    task_sentence,
    time_section,
)
from posttrain.web.loop_view import MOST_COMPARED, compare_runs, live_training, loop_alarms, training_runs
from posttrain.web.request_bodies import RequestRejected
from posttrain.web.translations import translator_of

ROWS = 25
"""Rows of a page of records."""

_TABS = ("/dashboard", "/rounds", "/runs", "/records", "/lineage", "/models")
_RUNS = 200

_FORMATS = {"metric_text": metric_text, "metric_name": metric_name, "seconds": format_seconds, "bytes_text": bytes_text}
"""The functions that the tables of these pages format their numbers with."""

Reader = Annotated[Principal, page_access(LOOP)]
Start = Annotated[int, Query(ge=0, le=10**9)]
Text = Annotated[str, Query(max_length=200)]


def loop_pages(site: Site) -> APIRouter:
    """Builds the routes; everyone but annotators may read them."""
    add_to_navigation("nav.dashboard", "/dashboard", LOOP)
    router = APIRouter(include_in_schema=False)
    workspace = site.workspace
    monitor = SystemMonitor(workspace.root)

    @router.get("/dashboard")
    def dashboard(request: Request, principal: Reader) -> Response:
        config = _config()
        loop = read_loop(workspace, config)
        # Faults of annotators are for those who may read the quality report; the page does not wait for it.
        quality = site.quality.get(wait=0) if principal.may("reviewer") else None
        live = live_training(workspace)
        open_batches = [site.queue.progress(batch.name) for batch in site.queue.batches("open")]
        return _page(
            request,
            principal,
            "dashboard.html",
            name=workspace.root.name,
            task=task_sentence(config),
            state=loop.state,
            titles={step.name: step.title or step.name for step in known_steps(config)},
            seconds=format_seconds,
            tiles=headline(loop),
            rolled_back=loop.rollback,
            alarms=loop_alarms(workspace, loop, quality, translator_of(request)),
            curve=learning_curve(loop),
            live=live[0] if live else None,
            training=[Tiles(training_headline(live[1])[:4]), loss_chart(live[1], among=4)] if live else [],
            # One that was imported stays open when all of it is decided: there is nothing to do then.
            batches=[batch for batch in open_batches if batch.resolved < batch.items],
            uses=monitor.read(),
        )

    @router.get("/rounds")
    def rounds(request: Request, principal: Reader) -> Response:
        loop = read_loop(workspace, _config())
        links = [(f"/rounds/{step.name}", step.title or step.name) for step in _reporting(loop.config)]
        sections = [decisions_section(loop), time_section(loop)]
        return _sections(request, principal, translator_of(request)("tab.rounds"), sections, links=links)

    @router.get("/rounds/{stage}")
    def rounds_of_stage(request: Request, principal: Reader, stage: str) -> Response:
        step = next((step for step in _reporting(_config()) if step.name == stage), None)
        if step is None:
            raise RequestRejected(404, translator_of(request)("error.page"))
        sections = list(step.sections(read_rounds(workspace)))
        return _sections(request, principal, step.title or step.name, sections, section_path="/rounds")

    @router.get("/runs")
    def runs(request: Request, principal: Reader, run: Annotated[list[str] | None, Query()] = None) -> Response:
        trainings = training_runs(workspace)
        chosen = [training for training in trainings if training.run.id in (run or ())]
        if len(run or ()) > MOST_COMPARED:
            raise RequestRejected(422, translator_of(request)("runs.too_many", most=MOST_COMPARED))
        single = chosen[0] if len(chosen) == 1 else None
        # Oldest first, as their names read.
        sections = compare_runs(workspace, chosen[::-1]) if len(chosen) > 1 else []
        curves = read_round_training(workspace, single.run, single.name) if single else None
        shown = [Tiles(training_headline(curves)), *training_blocks(curves)] if curves and len(curves.steps) else []
        return _page(
            request,
            principal,
            "runs.html",
            trainings=trainings[:_RUNS],
            chosen={training.run.id for training in chosen},
            sections=sections,
            single=single,
            shown=shown,
            main=next((name for training in trainings for name in training.metrics), None),
            most=MOST_COMPARED,
            **_FORMATS,
        )

    @router.get("/records")
    def records(
        request: Request, principal: Reader, version: Text = "", split: Text = "", q: Text = "", start: Start = 0
    ) -> Response:
        versions = workspace.metadata.names()[::-1]
        counts = {row.id: row.meta["counts"] for row in workspace.metadata.artifacts("dataset")}
        page, splits, problem = None, [], ""
        named = next((one for one in versions if one.text == version), versions[0] if versions else None)
        if version and (named is None or named.text != version):
            raise RequestRejected(404, f"there is no version `{version}`")
        if named is not None:
            try:
                opened = Version.open(workspace.artifacts, named.artifact_id)
                splits = [*opened.splits, REJECTED]
                page = search_records(opened, q, split or None, start=start, count=ROWS)
            except DamagedArtifactError as error:
                problem = str(error)
        return _page(
            request,
            principal,
            "records.html",
            versions=versions,
            counts=counts,
            named=named,
            splits=splits,
            split=split,
            q=q,
            page=page,
            rows=[_shown(row) for row in page.rows] if page else [],
            size=ROWS,
            problem=problem,
            sections=list(Collect.sections(read_rounds(workspace))),
            rejected=REJECTED,
        )

    @router.get("/records/{id}")
    def record(request: Request, principal: Reader, id: str) -> Response:
        result = show(workspace, id)
        if result["type"] != "record":
            raise RequestRejected(404, translator_of(request)("error.page"))
        return _page(
            request,
            principal,
            "record.html",
            result=result,
            record=result["record"],
            turns=record_turns(result["record"]),
            json=_json,
        )

    @router.get("/lineage")
    def lineage_page(request: Request, principal: Reader, id: Text = "") -> Response:
        problem, shown = "", None
        if id:
            try:
                shown = show(workspace, id, site.config)
            except UserError as error:
                if not is_user_mistake(error):
                    raise
                problem = str(error)
        return _page(
            request,
            principal,
            "lineage.html",
            sections=[lineage_section(workspace)],
            id=id,
            shown=shown,
            problem=problem,
            json=_json,
            **_FORMATS,
        )

    @router.get("/models")
    def models(request: Request, principal: Reader) -> Response:
        registry = ModelRegistry(workspace)
        candidates = {entry.candidate: entry for entry in workspace.metadata.rounds() if entry.candidate}
        listed: list[dict[str, Any]] = []
        for row in sorted(workspace.metadata.artifacts("model"), key=lambda row: row.created_at, reverse=True):
            entry = candidates.get(row.id)
            state = RoundState.from_row(entry) if entry else RoundState()
            listed.append({"row": row, "round": entry.number if entry else None, "state": state})
        deployments = workspace.metadata.deployments()[::-1]
        champion = registry.champion
        earlier = registry.earlier_champions() if deployments else []
        canary = registry.last_canary
        return _page(
            request,
            principal,
            "models.html",
            models=listed,
            champion=champion.model_id if champion else None,
            earlier=earlier,
            base={model for model in earlier if registry.is_base(model)},
            deployments=deployments,
            canary=canary,
            judgement=canary.detail.get("judgement") if canary else None,
            rounds={model: entry.number for model, entry in candidates.items()},
            main=next((name for entry in listed for name in entry["state"].metrics or ()), None),
            **_FORMATS,
        )

    def _config() -> Config:
        if site.config is None:
            raise RequestRejected(404, "this folder has no posttrain.yaml, and so no loop")
        return site.config.model_copy(update={"task": site.config.task.with_labels_from(workspace.root)})

    def _reporting(config: Config) -> list[type[RoundStep]]:
        """Returns the stages that have sections of their own."""
        return [step for step in known_steps(config) if "sections" in vars(step)]

    def _sections(
        request: Request,
        principal: Principal,
        title: str,
        sections: Sequence[Section],
        links: Sequence[tuple[str, str]] = (),
        **content: Any,
    ) -> Response:
        more = {"title": title, "sections": sections, "links": links, **content}
        return _page(request, principal, "sections_page.html", **more)

    def _page(request: Request, principal: Principal, template: str, **content: Any) -> Response:
        return app_page(request, principal, template, tabs=_TABS, **content)

    return router


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of a record's table: the last turn of its prompt, or its text."""
    turns = record_turns(row)
    text = turns[-1]["content"] if turns else row["text"] or ""
    why = dict.fromkeys(("step", "reason", "detail"))
    return {**why, **row, "shown": shorten(text, 400), "turns": len(turns)}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)
