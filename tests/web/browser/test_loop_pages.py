"""The pages of the loop, of quality and of people, in a real browser on the real server."""

import csv
import json
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import pytest
from playwright.sync_api import expect
from sample_batches import PASSWORD

from posttrain.label.accounts import Accounts
from posttrain.label.queue_rows import NewItem

pytestmark = pytest.mark.slow

PAGES = {
    "/dashboard": "viewer",
    "/rounds": "viewer",
    "/runs": "viewer",
    "/records": "viewer",
    "/lineage": "viewer",
    "/models": "viewer",
    "/account": "viewer",
    "/quality": "reviewer",
    "/people": "reviewer",
    "/people/audit": "owner",
}
MARKUP = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'{{7*7}}"


def champion(live: Any) -> str:
    return str(live.store.metadata.deployments()[-1].model_id)


def test_a_model_is_promoted_and_rolled_back_after_a_question(live_loop: Any) -> None:
    models = [row.candidate for row in live_loop.store.metadata.rounds()]
    assert champion(live_loop) == models[2]
    visit = live_loop.visit("olga")
    page = visit.open("/models")
    promote = page.get_by_role("button", name=f"Promote {models[1]}")
    promote.click()
    dialog = page.get_by_role("dialog", name="Promote this model?")
    assert models[1] in dialog.inner_text()
    assert models[2] in dialog.inner_text(), "the model that leaves service"
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert champion(live_loop) == models[2], "nothing happens before the answer"
    promote.focus()
    page.keyboard.press("Enter")
    dialog.get_by_label("Reason").fill("fewer complaints")
    with page.expect_navigation():
        dialog.get_by_role("button", name="Promote").click()
    assert champion(live_loop) == models[1]
    assert live_loop.store.metadata.deployments()[-1].reason == "fewer complaints (olga)"
    assert models[1] in page.locator("#champion").inner_text()
    assert "fewer complaints (olga)" in page.locator("#history").inner_text()
    page.get_by_role("button", name="Roll back", exact=True).first.click()
    dialog = page.get_by_role("dialog", name="Roll back the champion?")
    dialog.get_by_label("Reason").fill("slower")
    with page.expect_navigation():
        dialog.get_by_role("button", name="Roll back").click()
    assert champion(live_loop) == models[2]
    assert live_loop.store.champion_path.resolve().name == models[2]
    visit.open("/people/audit?action=promote")
    assert models[1] in page.locator("#changes").inner_text()
    visit.assert_quiet()


def test_a_dialog_shows_why_the_server_refused(live_loop: Any) -> None:
    page = live_loop.visit("olga").open("/people")
    page.get_by_role("button", name="Manage olga").click()
    dialog = page.locator("dialog[open]")
    dialog.get_by_label("Role").select_option("viewer")
    dialog.get_by_role("button", name="Change the role").click()
    alert = dialog.get_by_role("alert").filter(has_text="only owner")
    alert.wait_for()
    assert "make another account an owner first" in alert.inner_text()
    dialog.get_by_role("button", name="Change the role").is_enabled()


def test_somebody_is_invited_joins_and_signs_in(live_loop: Any) -> None:
    page = live_loop.visit("olga").open("/people")
    page.get_by_role("button", name="Invite").click()
    dialog = page.get_by_role("dialog", name="Invite somebody")
    dialog.get_by_label("Note").fill("for Dana")
    dialog.get_by_role("button", name="Make the link").click()
    dialog.get_by_label("Link").wait_for()
    link = dialog.get_by_label("Link").input_value()
    assert link.startswith(f"{live_loop.address}/invitation?token=")
    with page.expect_navigation():
        dialog.get_by_role("button", name="Close").click()
    assert link.partition("=")[2] not in page.content(), "it is shown once"
    assert "for Dana" in page.locator("#invitations").inner_text()
    guest = live_loop.browser.new_context().new_page()
    guest.goto(link)
    guest.fill("#name", "dana")
    guest.fill("#password", "a new long password")
    guest.fill("#repeat", "a new long password")
    guest.get_by_role("button", name="Create the account").click()
    guest.wait_for_url(f"{live_loop.address}/")
    guest.goto(f"{live_loop.address}/label")
    assert guest.get_by_role("link", name="dana").is_visible()
    assert not guest.get_by_role("link", name="Dashboard").is_visible()
    assert guest.goto(link).status == 404, "and is used once"
    guest.context.close()
    page.reload()
    row = page.locator("#accounts tr", has_text="dana")
    assert "annotator" in row.inner_text()
    assert "for Dana" not in page.locator("#invitations").inner_text()


def test_somebody_is_paused_with_a_sentence_and_goes_on(live_loop: Any) -> None:
    accounts = Accounts(live_loop.store.metadata)
    page = live_loop.visit("rosa").open("/people")
    assert page.get_by_role("button", name="Invite").count() == 0, "that is for owners"
    page.get_by_role("button", name="Manage ben").click()
    dialog = page.locator("dialog[open]")
    assert dialog.get_by_label("Role").count() == 0
    dialog.get_by_label("Sentence").fill("Let us talk about refunds first.")
    with page.expect_navigation():
        dialog.get_by_role("button", name="Pause").click()
    assert accounts.get("ben").paused == "Let us talk about refunds first."
    assert page.get_by_role("status").filter(has_text="ben is paused").is_visible()
    assert "paused" in page.locator("#accounts tr", has_text="ben").inner_text()
    page.get_by_role("button", name="Manage ben").click()
    assert "Let us talk" in page.locator("dialog[open]").inner_text()
    with page.expect_navigation():
        page.locator("dialog[open]").get_by_role("button", name="Resume").click()
    assert accounts.get("ben").paused is None


def test_a_token_is_made_shown_once_used_and_revoked(live_loop: Any) -> None:
    page = live_loop.visit("anna").open("/account")
    page.get_by_role("button", name="Make a token").first.click()
    dialog = page.locator("dialog[open]")
    dialog.get_by_label("Note").fill("nightly export")
    dialog.get_by_role("button", name="Make a token").click()
    dialog.get_by_label("Token").wait_for()
    token = dialog.get_by_label("Token").input_value()
    headers = {"Authorization": f"Bearer {token}"}
    assert page.request.get("/api/session", headers=headers).json()["name"] == "anna"
    with page.expect_navigation():
        page.keyboard.press("Escape")
    assert token not in page.content()
    with page.expect_navigation():
        page.locator("#tokens tr", has_text="nightly export").get_by_role("button", name="Revoke").click()
    assert page.request.get("/api/session", headers=headers).status == 401


def pause_in_training(run: BaseProcess, live: Any) -> None:
    """Stops the process while it trains: a round takes a second here, less than the page waits between two readings."""
    assert run.pid is not None
    while True:
        assert run.is_alive(), live.root.with_suffix(".run.log").read_text()
        if live.store.metadata.runs(stage="train", status="running"):
            os.kill(run.pid, signal.SIGSTOP)
            if live.store.metadata.runs(stage="train", status="running"):
                return
            os.kill(run.pid, signal.SIGCONT)
        time.sleep(0.005)


def test_the_dashboard_follows_a_run_that_trains(live_new: Any) -> None:
    visit = live_new.visit("olga")
    page = visit.open("/dashboard")
    page.evaluate("window.kept = true")
    assert "No round has begun" in page.locator("#picture").inner_text()
    page.wait_for_selector("#stream.on")
    run = forked.start(["run"], live_new.root, live_new.root.with_suffix(".run.log"))
    pause_in_training(run, live_new)
    page.wait_for_selector("#picture li.running", timeout=60_000)
    os.kill(run.pid, signal.SIGCONT)
    page.wait_for_selector("#training figure.chart svg", timeout=60_000)
    run.join(120)
    assert run.exitcode == 0
    # Not by an expression of the page: the policy forbids to evaluate one again and again.
    expect(page.locator("#tiles")).to_contain_text("2 / 2", timeout=30_000)
    page.wait_for_selector("#curve figure.chart svg")
    lines = page.locator("#log p").all_inner_texts()
    assert any("round 2" in line for line in lines)
    assert page.evaluate("window.kept"), "the page was not read again"
    visit.assert_quiet()


def test_trainings_are_compared_side_by_side(live_loop: Any) -> None:
    visit = live_loop.visit("rosa")
    page = visit.open("/runs")
    page.get_by_role("checkbox", name="round 1").check()
    page.get_by_role("checkbox", name="round 2").check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_selector("#curves figure.chart svg")
    assert page.locator("#results thead").inner_text().split() == ["result", "round", "1", "round", "2"]
    differing = page.locator("#differences tbody tr th").all_inner_texts()
    assert "dataset" in differing
    assert "train.learning_rate" not in differing, "it is the same in both"
    visit.assert_quiet()


def test_records_are_searched_and_lead_to_their_models(live_loop: Any) -> None:
    visit = live_loop.visit("rosa")
    page = visit.open("/records?version=train%40v2")
    page.get_by_label("search in").fill("CARD")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=CARD*")
    rows = page.locator("#browse tbody tr")
    rows.first.wait_for()
    assert all("card" in text for text in rows.all_inner_texts())
    rows.first.get_by_role("link").click()
    page.wait_for_url("**/records/*")
    page.locator("#life a", has_text="model-").first.click()
    assert "made by train" in page.locator("#find").inner_text()
    visit.assert_quiet()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_each_page_is_accessible_and_fits(live_loop: Any, width: int, scheme: str) -> None:
    visit = live_loop.visit("olga", width, scheme)
    runs = [f"run={run.id}" for run in live_loop.store.metadata.runs(stage="train")]
    model = champion(live_loop)
    visit.open("/quality").wait_for_selector("#agreement", timeout=60_000)
    record = visit.open("/records").locator("#browse tbody a").first.get_attribute("href")
    details = (record, f"/runs?{'&'.join(runs)}", f"/lineage?id={model}", "/records/x")
    for path in (*PAGES, *(details if width < 600 else details[:1])):
        page = visit.open(path)
        page.wait_for_load_state("networkidle") if path != "/dashboard" else page.wait_for_selector("#stream.on")
        visit.assert_fits()
        visit.assert_accessible()
        for opener in page.locator("[data-open]").all()[:2] if width < 600 else ():
            opener.click()
            visit.assert_accessible()
            page.keyboard.press("Escape")
    # The page of a record that does not exist answers 404, which the browser reports.
    assert [error for error in visit.errors if "404" not in error and "422" not in error] == []


def test_pages_in_chinese(live_loop: Any) -> None:
    visit = live_loop.visit("olga", language="zh")
    for path in PAGES:
        page = visit.open(path)
        assert page.locator("html").get_attribute("lang") == "zh"
        headings = page.locator("main h2:visible").all_inner_texts()
        assert all(
            any("\u4e00" <= letter <= "\u9fff" for letter in heading) or "API" in heading for heading in headings
        )
    visit.assert_quiet()


def test_markup_in_records_names_and_notes_stays_text(live_new: Any) -> None:
    root: Path = live_new.root
    texts = [f"{MARKUP} {number}" for number in range(60)]
    (root / "evil.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    with (root / "answers.csv").open("a", encoding="utf-8", newline="") as answers:
        csv.writer(answers).writerows((text, "card") for text in texts)
    config = (root / "posttrain.yaml").read_text().replace("- pool.csv", "- pool.csv\n  - evil.jsonl", 1)
    (root / "posttrain.yaml").write_text(config.replace("rounds: 2", "rounds: 1"))
    run = forked.start(["run"], root, root.with_suffix(".run.log"))
    run.join(120)
    assert run.exitcode == 0
    accounts = Accounts(live_new.store.metadata)
    accounts.pause("ben", MARKUP, "olga")
    accounts.tokens.invite("viewer", MARKUP, "olga")
    accounts.tokens.issue_api_token("olga", MARKUP, "olga")
    live_new.queue.add_batch(MARKUP[:60], "choice", [NewItem("r1", {"text": MARKUP})], labels=[MARKUP, "card"])
    live_new.queue.answer(live_new.queue.next("anna").item, "anna", MARKUP)
    with (live_new.store.home / "run.log").open("a") as log:
        log.write(f"{MARKUP}\n")
    visit = live_new.visit("olga")
    for path in (*PAGES, "/records?version=pool%40v1&q=script", f"/lineage?id={MARKUP}", f"/records?q={MARKUP}"):
        page = visit.open(path)
        page.wait_for_timeout(300)
        if path == "/dashboard":
            page.wait_for_selector("#log p:not(.empty)")
        for opener in page.locator("[data-open]").all():
            opener.click()
            page.keyboard.press("Escape")
        visit.assert_quiet()
        assert "49" not in page.locator("main h1").inner_text()
    page = visit.open("/records?version=pool%40v1&q=script")
    assert MARKUP in page.locator("#browse tbody").inner_text()
    page.locator("#browse tbody a").first.click()
    assert MARKUP in page.locator("#text").inner_text()
    visit.assert_quiet()
    assert PASSWORD not in page.content()


def test_a_phone_shows_the_numbers_of_people_and_quality(live_loop: Any) -> None:
    visit = live_loop.visit("olga", 390)
    for path in ("/people", "/quality", "/runs"):
        page = visit.open(path)
        if path == "/quality":
            page.wait_for_selector("table.stacked")
        ends = page.locator("table.stacked tbody td").evaluate_all(
            "cells => cells.filter((cell) => /[0-9]/.test(cell.innerText)).map((cell) => {"
            " const range = document.createRange(); range.selectNodeContents(cell);"
            " return range.getBoundingClientRect().right; })"
        )
        assert ends, path
        assert max(ends) <= 390, path
    visit.assert_quiet()
