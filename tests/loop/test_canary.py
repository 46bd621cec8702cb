"""A canary: the split that servers read, the outcomes that decide, and its end, even after a kill at any moment."""

import hashlib
import json
import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.feedback.entries import Feedback, Ratings, feedback_row, outcome_of
from posttrain.data.feedback.inbox import Inbox
from posttrain.loop import model_registry, traffic_split
from posttrain.loop.canary import describe_canary, judge, judge_canary, start_canary
from posttrain.loop.config import Config
from posttrain.loop.hooks import CanaryConfig, DeployConfig
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.traffic_split import choose_arm, read_split, split_path
from posttrain.store.database import utc_now
from posttrain.store.errors import UserError
from posttrain.store.rows import Canary
from posttrain.store.stage_runner import run_stage
from posttrain.store.workspace import Workspace

A, B, C = "abc"


@pytest.fixture
def config() -> Config:
    data = {"pool": ["pool.csv"], "test": ["test.csv"]}
    return Config.read({"model": "tiny", "data": data}, "posttrain.yaml")


@pytest.fixture
def model(store: Workspace) -> dict[str, str]:
    """Ids of models that consist only of their name; the first one is the champion."""

    def create(name: str) -> str:
        def work(out: Path, scratch: Path) -> dict[str, Any]:
            (out / "name").write_text(name)
            return {}

        return run_stage(store, name, 1, kind="model", inputs={}, config={}, seed=0, round=None, work=work).id

    ids = {name: create(name) for name in "abc"}
    ModelRegistry(store).promote(ids[A], round=0, action="baseline")
    return ids


@pytest.fixture
def send(store: Workspace) -> Callable[..., None]:
    """Sends outcomes of arms in turn: name, number, and number of good ones, which come first."""
    sent = iter(range(10**6))

    def post(*arms: tuple[str | None, int, int]) -> None:
        entries = [(at / total, arm, at < good) for arm, total, good in arms for at in range(total)]
        with Inbox(store.home / "inbox") as inbox:
            futures = [
                inbox.append(
                    Feedback(id=f"f-{next(sent)}", prompt="p", completion="x", rating="up" if good else "down", arm=arm)
                )
                for _, arm, good in sorted(entries, key=lambda entry: entry[0])
            ]
            for future in futures:
                future.result()

    return post


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    logging.getLogger("posttrain").propagate = True
    caplog.set_level(logging.INFO, "posttrain")
    return lambda: [record.getMessage() for record in caplog.records]


def begin(store: Workspace, config: Config, model: str, share: float = 0.1) -> Canary:
    return start_canary(store, config, model, share, "try")


def last(store: Workspace) -> Canary:
    canary = ModelRegistry(store).last_canary
    assert canary is not None
    return canary


def test_the_split_is_there_while_a_canary_runs(store: Workspace, config: Config, model: dict[str, str]) -> None:
    assert [(arm.name, arm.share, arm.path) for arm in read_split(store.root).arms] == [
        (None, 1.0, store.champion_path)
    ]
    canary = begin(store, config, model[B])
    assert [(arm.name, arm.model, arm.share) for arm in read_split(store.root).arms] == [
        ("canary-1", model[B], 0.1),
        ("champion-1", model[A], 0.9),
    ]
    assert [(arm.path / "name").read_text() for arm in read_split(store.root).arms] == [B, A]
    assert ModelRegistry(store).champion_id == model[A]
    ModelRegistry(store).end_canary(canary.id, "stopped", "by hand")
    assert not split_path(store).exists()
    assert len(read_split(store.root).arms) == 1


def test_the_workspace_can_be_moved(store: Workspace, config: Config, model: dict[str, str], tmp_path: Path) -> None:
    begin(store, config, model[B])
    store.root.rename(tmp_path / "moved")
    arms = read_split(tmp_path / "moved").arms
    assert [(arm.path / "name").read_text() for arm in arms] == [B, A]


def test_the_rule_is_the_documented_one(store: Workspace, config: Config, model: dict[str, str]) -> None:
    begin(store, config, model[B], 0.3)
    split = read_split(store.root)
    content = json.loads(split_path(store).read_text())
    names = []
    for user in range(5000):
        bits = hashlib.sha256(f"{content['salt']}:user-{user}".encode()).digest()[:4]
        number = int.from_bytes(bits, "big") / 2**32
        expected = content["arms"][0 if number < 0.3 else 1]["name"]
        assert choose_arm(split, f"user-{user}").name == expected
        names.append(expected)
    # Five standard deviations of a binomial.
    assert abs(names.count("canary-1") - 1500) < 5 * (5000 * 0.3 * 0.7) ** 0.5


def test_another_canary_draws_other_users(store: Workspace, config: Config, model: dict[str, str]) -> None:
    users = []
    for _ in range(2):
        canary = begin(store, config, model[B], 0.5)
        split = read_split(store.root)
        users.append({user for user in range(1000) if choose_arm(split, str(user)).name == canary.name})
        ModelRegistry(store).end_canary(canary.id, "stopped", "by hand")
    assert 180 < len(users[0] & users[1]) < 320


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": 1, "arms": 3}', '{"version": 99}'])
def test_a_damaged_split_is_one_clear_line(
    store: Workspace, config: Config, model: dict[str, str], content: str
) -> None:
    begin(store, config, model[B])
    split_path(store).write_text(content)
    with pytest.raises(UserError, match=r"canary\.json"):
        read_split(store.root)
    ModelRegistry(store).sync()
    assert len(read_split(store.root).arms) == 2


def test_a_worse_canary_is_rolled_back(
    store: Workspace, config: Config, model: dict[str, str], send: Callable[..., None], lines: Callable[[], list[str]]
) -> None:
    begin(store, config, model[B])
    send(("canary-1", 100, 50), ("champion-1", 900, 810))
    line = judge_canary(store, config)
    assert line is not None
    assert line.startswith("canary-1 rolled back: canary-1 ")
    assert lines()[-1] == line
    canary = last(store)
    assert (canary.status, f"canary-1 rolled back: {canary.conclusion}") == ("rolled_back", line)
    assert canary.finished_at is not None
    assert ModelRegistry(store).champion_id == model[A]
    assert [row.action for row in store.metadata.deployments()] == ["baseline"]
    assert not split_path(store).exists()
    numbers = canary.detail["judgement"]
    assert numbers["test"]["worse"] >= 20
    assert numbers["test"]["high"] < 0
    # Only what had come until the decision.
    assert numbers["canary"]["total"] < 100
    assert judge_canary(store, config) is None


def test_a_canary_that_is_not_worse_becomes_the_champion(
    store: Workspace, config: Config, model: dict[str, str], send: Callable[..., None]
) -> None:
    begin(store, config, model[B], 0.5)
    send(("canary-1", 300, 297), ("champion-1", 300, 240))
    assert judge_canary(store, config) is not None
    canary, champion = last(store), ModelRegistry(store).champion
    assert champion is not None
    assert (canary.status, champion.model_id, champion.action) == ("promoted", model[B], "promote")
    assert champion.reason == canary.conclusion
    assert "surely not worse by 5 points" in champion.reason
    assert (store.champion_path / "name").read_text() == B
    assert not split_path(store).exists()


def test_looking_again_and_again_decides_nothing_else(
    store: Workspace, config: Config, model: dict[str, str], send: Callable[..., None], lines: Callable[[], list[str]]
) -> None:
    begin(store, config, model[B], 0.5)
    send(("canary-1", 40, 30), ("champion-1", 40, 31))
    first = judge_canary(store, config)
    said = len(lines())
    for _ in range(3):
        assert judge_canary(store, config) == first
    assert len(lines()) == said, "what has not changed is said once"
    assert last(store).status == "running"
    assert last(store).detail["judgement"]["canary"]["total"] == 40
    assert first is not None
    assert "undecided" in first
    assert first in describe_canary(last(store))


def test_an_undecided_canary_ends_and_the_champion_stays(
    store: Workspace, config: Config, model: dict[str, str], send: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = begin(store, config, model[B], 0.5)
    send(("canary-1", 50, 40), ("champion-1", 50, 40))
    rules = CanaryConfig()
    assert judge(store, canary, rules).status == "running"
    assert judge(store, canary, rules, now=utc_now() + timedelta(days=13)).status == "running"
    assert judge(store, canary, rules, now=utc_now() + timedelta(days=15)).status == "kept"
    limited = judge(store, canary, CanaryConfig(max_outcomes=80))
    assert (limited.status, limited.canary.total + limited.champion.total) == ("kept", 80)
    monkeypatch.setattr("posttrain.loop.canary.utc_now", lambda: utc_now() + timedelta(days=15))
    judge_canary(store, config)
    assert last(store).status == "kept"
    assert (last(store).conclusion or "").endswith("undecided in time, the champion stays")
    assert ModelRegistry(store).champion_id == model[A]


def test_outcomes_after_the_last_day_do_not_count(
    store: Workspace, config: Config, model: dict[str, str], send: Callable[..., None]
) -> None:
    canary = begin(store, config, model[B], 0.5)
    send(("canary-1", 100, 10), ("champion-1", 100, 90))
    worse = judge(store, canary, CanaryConfig())
    assert worse.status == "rolled_back"
    assert worse.difference == worse.canary.good / worse.canary.total - worse.champion.good / worse.champion.total < 0
    late = judge(store, canary, CanaryConfig(days=1e-9))
    assert (late.status, late.canary.total) == ("kept", 0)


def test_a_third_name_and_a_silent_arm_are_one_line_each_and_stop_nothing(
    store: Workspace, config: Config, model: dict[str, str], send: Callable[..., None], lines: Callable[[], list[str]]
) -> None:
    begin(store, config, model[B])
    send(("champion-1", 90, 80), ("blue", 10, 10), (None, 5, 5))
    judge_canary(store, config)
    judge_canary(store, config)
    named = [line for line in lines() if "`blue`" in line]
    silent = [line for line in lines() if "has reported no outcome" in line]
    assert len(named) == len(silent) == 1
    assert "canary-1 or champion-1" in named[0]
    assert silent[0].startswith("canary-1: canary-1 has reported")
    canary = last(store)
    assert canary.status == "running"
    assert canary.detail["judgement"]["unknown"] == {"blue": 10}
    assert canary.detail["judgement"]["unnamed"] == 5
    # It is no longer silent once it reports.
    send(("canary-1", 5, 4))
    assert [problem[:8] for problem in judge(store, canary, CanaryConfig()).problems] == ["feedback"]


def test_an_arm_that_falls_silent_is_named(
    store: Workspace, config: Config, model: dict[str, str], send: Callable[..., None]
) -> None:
    canary = begin(store, config, model[B], 0.5)
    send(("canary-1", 20, 15), ("champion-1", 20, 15))
    assert judge(store, canary, CanaryConfig()).problems == ()
    send(("champion-1", 20, 15))
    (problem,) = judge(store, canary, CanaryConfig()).problems
    assert problem.startswith("canary-1 does not report at the time of champion-1")


def test_an_arm_is_silent_only_once_chance_is_no_excuse(
    store: Workspace, config: Config, model: dict[str, str], send: Callable[..., None]
) -> None:
    canary = begin(store, config, model[B])
    assert judge(store, canary, CanaryConfig()).problems == ()
    send(("champion-1", 40, 30))
    assert judge(store, canary, CanaryConfig()).problems == ()
    send(("champion-1", 30, 20))
    assert len(judge(store, canary, CanaryConfig()).problems) == 1
    assert len(judge(store, canary, CanaryConfig(), now=utc_now() + timedelta(days=2)).problems) == 1


def test_late_outcomes_of_an_earlier_canary_count_for_nobody(
    store: Workspace, config: Config, model: dict[str, str], send: Callable[..., None]
) -> None:
    first = begin(store, config, model[B])
    send(("canary-1", 5, 5))
    ModelRegistry(store).end_canary(first.id, "stopped", "by hand")
    second = begin(store, config, model[C])
    send(("canary-1", 9, 0), ("canary-2", 3, 2), ("champion-2", 30, 20))
    judgement = judge(store, second, CanaryConfig())
    assert (judgement.canary.total, judgement.canary.good, judgement.problems) == (3, 2, ())


def test_only_one_canary_runs(store: Workspace, config: Config, model: dict[str, str]) -> None:
    begin(store, config, model[B])
    with pytest.raises(UserError, match=r"canary-1 runs already.*models canary --stop"):
        begin(store, config, model[C])
    assert len(store.metadata.canaries()) == 1


def test_what_cannot_be_a_canary_is_refused(store: Workspace, config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a model"):
        begin(store, config, "model-0000000000000000")

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        return {}

    id = run_stage(store, "m", 1, kind="model", inputs={}, config={}, seed=0, round=None, work=work).id
    with pytest.raises(UserError, match="no champion to compare"):
        begin(store, config, id)
    ModelRegistry(store).promote(id, round=0)
    with pytest.raises(UserError, match="is the champion already"):
        begin(store, config, id)
    assert store.metadata.canaries() == []
    assert not split_path(store).exists()


@pytest.mark.parametrize(("promoted", "status"), [(B, "promoted"), (C, "stopped")])
def test_another_champion_ends_the_canary(
    store: Workspace, config: Config, model: dict[str, str], promoted: str, status: str
) -> None:
    begin(store, config, model[B])
    ModelRegistry(store).promote(model[promoted], round=None, reason="by hand")
    assert last(store).status == status
    assert not split_path(store).exists()
    assert ModelRegistry(store).champion_id == model[promoted]


def test_a_rollback_ends_the_canary_and_typed_twice_it_is_once(
    store: Workspace, config: Config, model: dict[str, str]
) -> None:
    registry = ModelRegistry(store)
    registry.promote(model[C], round=1)
    begin(store, config, model[B])
    plan = registry.rollback("bad")
    assert (plan.source, plan.target, plan.ends_canary, plan.done) == (model[B], model[C], True, False)
    assert (last(store).status, last(store).conclusion) == ("rolled_back", "bad")
    plan = registry.rollback("bad")
    assert (plan.target, plan.done) == (model[C], True)
    assert registry.champion_id == model[C]
    # A named model, or a later promotion, is meant.
    registry.rollback("further", to=model[A])
    assert registry.champion_id == model[A]
    registry.promote(model[B], round=2)
    assert registry.rollback("bad").target == model[A]


def test_a_rollback_to_a_named_model_stops_the_canary(store: Workspace, config: Config, model: dict[str, str]) -> None:
    registry = ModelRegistry(store)
    registry.promote(model[C], round=1)
    begin(store, config, model[B])
    registry.rollback("bad", to=model[A])
    assert (registry.champion_id, last(store).status) == (model[A], "stopped")


def test_a_damaged_canary_ends_and_the_champion_stays(
    store: Workspace, config: Config, model: dict[str, str], lines: Callable[[], list[str]]
) -> None:
    begin(store, config, model[B])
    (store.artifacts.path(model[B]) / "name").write_text("flipped")
    with Workspace.open(store.root) as later:  # a process verifies an artifact only once
        ModelRegistry(later).sync()
        assert last(later).status == "stopped"
        assert model[B] in (last(later).conclusion or "")
        assert judge_canary(later, config) is None
    assert "canary-1 ended" in lines()[-1]
    assert not split_path(store).exists()


class Killed(BaseException):
    """Stands for a kill at one moment."""


@pytest.mark.parametrize("ends", ["start", "promoted", "rolled_back"])
@pytest.mark.parametrize("moment", ["write_split", "remove_split", "call_canary", "call"])
def test_file_row_and_hook_are_in_line_after_a_kill(
    store: Workspace,
    config: Config,
    model: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    ends: str,
) -> None:
    calls: list[str] = []
    hooks = DeployConfig(command="true")
    config = config.model_copy(update={"deploy": hooks})
    canary = None if ends == "start" else begin(store, config, model[B])
    with monkeypatch.context() as patch:

        def die(*arguments: Any) -> None:
            raise Killed

        patch.setattr(model_registry, moment, die)
        try:
            if canary is None:
                begin(store, config, model[B])
            else:
                ModelRegistry(store, hooks).end_canary(canary.id, ends, "decided")
        except Killed:
            pass
    monkeypatch.setattr(model_registry, "call_canary", lambda *arguments: calls.append(arguments[1].status) or True)
    ModelRegistry(store, hooks).sync()
    ModelRegistry(store, hooks).sync()
    row = last(store)
    assert row.status == ("running" if canary is None else ends)
    assert split_path(store).exists() == (canary is None)
    assert ModelRegistry(store).champion_id == model[B if ends == "promoted" else A]
    assert (store.champion_path / "name").read_text() == (B if ends == "promoted" else A)
    assert row.hook == "done"
    assert len(calls) <= 1


def test_the_hook_is_called_with_the_arms_and_the_champion(
    store: Workspace, config: Config, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[dict[str, Any]] = []
    monkeypatch.setattr("posttrain.loop.hooks.post_json", lambda url, body, timeout: bodies.append(body))
    config = config.model_copy(update={"deploy": DeployConfig(webhook="http://127.0.0.1:1/")})
    canary = begin(store, config, model[B])
    ModelRegistry(store, config.deploy).end_canary(canary.id, "promoted", "better")
    assert [body["action"] for body in bodies] == ["canary", "promote", "canary_promoted"]
    # A server that knows no canary loads the champion, whatever the action.
    assert [body["model"] for body in bodies] == [model[A], model[B], model[B]]
    assert [[arm["name"] for arm in body.get("arms", [])] for body in bodies] == [["canary-1", "champion-1"], [], []]
    assert bodies[0]["canary"] == {"name": "canary-1", "model": model[B], "split": str(split_path(store))}


def test_a_split_is_not_written_twice(
    store: Workspace, config: Config, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store, config, model[B])
    monkeypatch.setattr(traffic_split, "write_atomically", lambda *arguments: pytest.fail("written again"))
    ModelRegistry(store).sync()


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"completion": "x", "rating": "up"}, True),
        ({"completion": "x", "rating": 0}, False),
        ({"completion": "x", "rating": 0.5}, None),
        ({"completion": "x", "rating": "up", "corrected_answer": "y"}, True),
        ({"completion": "x", "corrected_answer": "y"}, False),
        ({"completion": "x ", "corrected_answer": "x"}, True),
        ({"corrected_answer": "x"}, None),
    ],
)
def test_feedback_says_whether_the_answer_was_good(fields: dict[str, Any], outcome: bool | None) -> None:
    feedback = Feedback.read({"id": "1", "prompt": "p", **fields}, "feedback")
    assert outcome_of(feedback.model_dump()) is outcome


def test_a_record_keeps_the_arm_that_answered() -> None:
    feedback = {"id": "1", "prompt": "p", "completion": "x", "rating": "up"}
    assert feedback_row({**feedback, "arm": "canary-1"}, "now", Ratings())[1]["meta"]["feedback"]["arm"] == "canary-1"
    assert "arm" not in feedback_row(feedback, "now", Ratings())[1]["meta"]["feedback"]
    with pytest.raises(UserError, match="one line"):
        Feedback.read({**feedback, "arm": "a\nb"}, "feedback")
