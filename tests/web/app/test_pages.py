"""Every page for every role, in workspaces of every state."""

from pathlib import Path
from typing import Any

import pytest

from posttrain.label.queue_rows import NewItem
from posttrain.loop.canary import start_canary
from posttrain.loop.loop import Loop
from posttrain.loop.state import RoundState, save_state
from posttrain.web.access import LOOP
from posttrain.web.app_page import NAVIGATION
from posttrain.web.lineage import read_lineage
from posttrain.web.loop_report import report_page
from posttrain.web.page import render_page

ROLES = ("viewer", "annotator", "reviewer", "owner")
PAGES = {
    "/": "viewer",
    "/dashboard": LOOP,
    "/rounds": LOOP,
    "/runs": LOOP,
    "/records": LOOP,
    "/lineage": LOOP,
    "/models": LOOP,
    "/account": "viewer",
    "/guidelines": "viewer",
    "/label": "annotator",
    "/review": "reviewer",
    "/quality": "reviewer",
    "/people": "reviewer",
    "/people/audit": "owner",
}


def may(role: str, least: str) -> bool:
    return role != "annotator" if least == LOOP else ROLES.index(role) >= ROLES.index(least)


HTML = {"Accept": "text/html"}


@pytest.fixture
def finished_server(finished_copy: Path, make_server: Any) -> Any:
    return make_server(finished_copy)


@pytest.fixture
def bare_server(tmp_path: Path, make_server: Any) -> Any:
    return make_server(tmp_path / "bare")


def test_a_page_is_shown_from_its_least_role_on_and_only_there(server: Any) -> None:
    for role in ROLES:
        client = server.browser(role)
        for path, least in PAGES.items():
            answer = client.get(path, headers=HTML)
            assert answer.status_code == (200 if may(role, least) else 403), (role, path, answer.text[-500:])
            assert answer.headers["cache-control"] == "no-store"
            assert "'unsafe" not in answer.headers["content-security-policy"]
        shown = client.get("/", headers=HTML).text
        for path, least in NAVIGATION.values():
            assert (f'href="{path}"' in shown) == may(role, least), (role, path)
    stranger = server.client()
    for path in PAGES:
        answer = stranger.get(path, headers=HTML)
        assert answer.status_code == 303
        assert answer.headers["location"] == f"/sign-in?next={path}"


def test_an_annotator_sees_no_commands_files_and_test_records(server: Any, batch: Any) -> None:
    site = server.site
    state = RoundState(waits_for="labels for round 1: fill the label column of labels/round-1.csv")
    site.workspace.metadata.open_round(0, None)
    save_state(site.workspace.metadata, 0, state, status="waiting")
    owner, annotator = (server.browser(role) for role in ("owner", "annotator"))
    assert "labels/round-1.csv" in owner.get("/", headers=HTML).text
    shown = annotator.get("/", headers=HTML).text
    for text in ("posttrain run", "labels/", ".csv", "The loop waits"):
        assert text not in shown, text
    assert "round-1" in shown
    for path in ("/records", "/records/000000000000", "/lineage?id=x", "/rounds/collect", "/metrics"):
        assert annotator.get(path, headers=HTML).status_code == 403, path


def test_the_pages_before_signing_in_name_the_workspace(server: Any) -> None:
    name = server.site.workspace.root.name
    stranger = server.client()
    assert f"<strong>{name}</strong>" in stranger.get("/sign-in", headers=HTML).text
    secret = server.site.accounts.tokens.invite("annotator", None, "terminal")
    text = stranger.get(f"/invitation?token={secret}", headers=HTML | {"Accept-Language": "zh"}).text
    assert name in text
    assert "工作区" in text


def test_only_owners_see_what_only_owners_may_do(server: Any) -> None:
    reviewer, owner = (server.browser(role).get("/people", headers=HTML).text for role in ("reviewer", "owner"))
    for text in ('id="invite"', "/role", "/link", "DELETE"):
        assert text in owner
        assert text not in reviewer
    assert "/pause" in reviewer


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/records?version=pool%40v9", 404),
        ("/records?split=nowhere", 422),
        ("/records?start=-1", 422),
        ("/records?start=99999999999999999999", 422),
        ("/records/zzzzzzzzzzzz", 422),
        ("/records/..%2f..%2fetc%2fpasswd", 404),
        ("/lineage?id=nothing", 200),
        ("/lineage?id=%00", 200),
        ("/runs?run=nothing", 200),
        ("/runs?" + "&".join(f"run={number}" for number in range(9)), 422),
        ("/quality?batch=nothing", 404),
        ("/quality?batch=%27%20OR%201", 404),
        ("/people/audit?before=0", 422),
        ("/people/audit?actor=%27%20OR%201", 200),
    ],
)
def test_a_wrong_address_is_answered_in_words(finished_server: Any, path: str, status: int) -> None:
    answer = finished_server.browser("owner").get(path, headers=HTML)
    assert answer.status_code == status, answer.text[-300:]
    assert "Traceback" not in answer.text


def test_the_pages_of_a_finished_loop(finished_server: Any) -> None:
    client, metadata = finished_server.browser("viewer"), finished_server.site.workspace.metadata
    model = metadata.deployments()[-1].model_id
    runs = "&".join(f"run={run.id}" for run in metadata.runs(stage="train"))
    texts = {path: client.get(path, headers=HTML).text for path in (*PAGES, f"/runs?{runs}", f"/lineage?id={model}")}
    assert model in texts["/models"]
    assert "Promote" not in texts["/models"], "a viewer is offered nothing that would be refused"
    assert "accuracy &gt;= 0" in texts["/rounds"]
    assert texts["/dashboard"].count('class="done"') > 5
    assert texts[f"/runs?{runs}"].count('<figure class="chart">') >= 3
    assert "pool@v1" in texts["/records"]


@pytest.mark.slow
def test_the_models_page_shows_a_canary_in_both_languages(finished_server: Any) -> None:
    site, viewer = finished_server.site, finished_server.browser("viewer")
    assert 'id="canary"' not in viewer.get("/models", headers=HTML).text
    model = next(row.candidate for row in site.workspace.metadata.rounds() if row.number == 1)
    start_canary(site.workspace, site.config, model, 0.1, "try")
    assert "Not judged yet" in viewer.get("/models", headers=HTML).text
    Loop(site.workspace, site.config).run()
    page = viewer.get("/models", headers=HTML).text
    assert "canary-1" in page
    assert "canary-1 0 of 0 good" in page
    chinese = viewer.get("/models", headers=HTML | {"Accept-Language": "zh"}).text
    assert "金丝雀发布" in chinese
    assert "canary-1：0/0 好评，champion-1：0/0 好评" in chinese
    assert viewer.get("/api/status").json()["canary"]["model"] == model
    assert "Canary: canary-1" in render_page(report_page(site.workspace, site.config))


def test_a_folder_without_a_loop_still_has_people(bare_server: Any) -> None:
    client = bare_server.browser("owner")
    for path in ("/dashboard", "/rounds"):
        assert client.get(path, headers=HTML).status_code == 404
    for path in ("/runs", "/records", "/lineage", "/models", "/quality", "/people", "/account"):
        assert client.get(path, headers=HTML).status_code == 200, path


def test_the_lineage_marks_what_the_champion_was_made_from_and_nothing_else(finished_server: Any) -> None:
    workspace = finished_server.site.workspace
    nodes, edges = read_lineage(workspace)
    marked = {node.id for node in nodes if node.marked}
    champion = workspace.metadata.deployments()[-1].model_id
    kinds = {node.id: node.kind for node in nodes}
    assert {kinds[id] for id in marked} == {"file", "dataset", "model", "deployment"}
    assert [id for id in marked if kinds[id] == "model"] == [champion]
    assert all(parent in marked for parent, child in edges if child in marked)
    leaves = {id for id in marked if not any(parent == id and child in marked for parent, child in edges)}
    assert {kinds[id] for id in leaves} == {"deployment"}
    assert len(leaves) == 1


def test_the_first_page_leads_to_the_work_that_a_role_may_do(server: Any, batch: Any) -> None:
    queue = server.site.queue
    queue.add_batch("a & b", "choice", [NewItem("r1", {"text": "one"})], labels=["card", "cash"])
    task = queue.next("annotator", "a & b")
    queue.flag(task.item, "annotator", "unclear")
    pages = {role: server.browser(role).get("/", headers=HTML).text for role in ROLES}
    label, review = 'href="/label?batch=round-1"', 'href="/review?batch=a%20%26%20b"'
    assert {role: (label in page, review in page) for role, page in pages.items()} == {
        "viewer": (False, False),
        "annotator": (True, False),
        "reviewer": (True, True),
        "owner": (True, True),
    }
    assert 'href="/label?batch=a' not in pages["owner"], "nothing is left to label there"
    assert "3 answers left, yours: 0" in pages["annotator"]
    assert "You are alone here" not in pages["owner"]
    server.site.accounts.pause("annotator", "Let us talk.", "owner")
    assert "Let us talk." in server.browser("annotator").get("/", headers=HTML).text


def test_an_owner_without_a_team_is_led_to_invitations(tmp_path: Path, make_server: Any) -> None:
    server = make_server(tmp_path / "alone")
    owner = server.browser("owner")
    assert "You are alone here" not in owner.get("/", headers=HTML).text
    for name in ("viewer", "annotator", "reviewer"):
        server.site.accounts.close(name, "owner")
    assert "You are alone here" in owner.get("/", headers=HTML).text
