"""``posttrain models promote --canary`` and ``models canary``, and how run, status and rollback treat a canary."""

from pathlib import Path
from typing import Any

import pytest

from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox

pytestmark = pytest.mark.slow


def send(root: Path, *arms: tuple[str, int, int]) -> None:
    with Inbox(root / ".posttrain" / "inbox") as inbox:
        for arm, good, bad in arms:
            for at in range(good + bad):
                rating = "up" if at < good else "down"
                entry = {"id": f"{arm}-{at}", "prompt": "p", "completion": "card", "rating": rating, "arm": arm}
                inbox.append(Feedback.read(entry, "feedback")).result()


@pytest.fixture
def earlier(finished_copy: Path, posttrain: Any) -> str:
    """The model of round 1, which is not the champion."""
    models = posttrain("models", "list", "-w", finished_copy, "--json").json
    return next(model["id"] for model in models if model["round"] == 1)


def test_a_canary_from_its_start_to_its_promotion(finished_copy: Path, posttrain: Any, earlier: str) -> None:
    root = finished_copy
    started = posttrain("models", "promote", earlier, "--canary", "50%", "-w", root).out
    assert f"canary-1: {earlier} has 50% of the requests since" in started
    assert "canary.json" in started
    assert "not judged yet" in posttrain("status", "-w", root).out
    send(root, ("canary-1", 60, 0), ("champion-1", 40, 20), ("green", 1, 0))
    shown = posttrain("models", "canary", "-w", root)
    assert "decided: the next posttrain run carries it out" in shown.out
    assert "names the arm `green`" in shown.out
    numbers = posttrain("models", "canary", "-w", root, "--json").json
    assert (numbers["status"], numbers["judgement"]["status"]) == ("running", "promoted")
    run = posttrain("run", "-w", root)
    assert "canary-1 promoted: canary-1 " in run.err + run.out
    status = posttrain("status", "-w", root)
    assert f"champion: {earlier}" in status.out
    assert posttrain("status", "-w", root, "--json").json["canary"] is None
    deployment = posttrain("show", earlier, "-w", root, "--json").json["deployments"][-1]
    assert deployment["action"] == "promote"
    assert "surely not worse" in deployment["reason"]
    assert "canary-1 promoted" in posttrain("models", "canary", "-w", root).out


def test_a_canary_is_stopped_and_rolled_back_by_hand(finished_copy: Path, posttrain: Any, earlier: str) -> None:
    root = finished_copy
    champion = posttrain("status", "-w", root, "--json").json["champion"]["id"]
    posttrain("models", "promote", earlier, "--canary", "10%", "-w", root)
    status = posttrain("status", "-w", root, "--json").json["canary"]
    assert (status["model"], status["share"], status["problems"]) == (earlier, 0.1, [])
    assert "canary-1 0 of 0 good" in posttrain("models", "canary", "-w", root).out
    stopped = posttrain("models", "canary", "--stop", "--reason", "odd answers", "-w", root).out
    assert stopped.startswith("canary-1 stopped: odd answers\n")
    posttrain("models", "promote", earlier, "--canary", "10%", "-w", root)
    first, second = (posttrain("models", "rollback", "-w", root).out for _ in range(2))
    assert first.startswith("canary-2 rolled back: by hand\nthe champion stays; ")
    assert second.startswith("the canary was rolled back before; ")
    assert posttrain("status", "-w", root, "--json").json["champion"]["id"] == champion
    posttrain("models", "promote", earlier, "--canary", "10%", "-w", root)
    promoted = posttrain("models", "promote", earlier, "--reason", "sure", "-w", root).out
    assert promoted.startswith(f"canary-3 promoted: sure\nchampion: {earlier}")


def test_mistakes_are_one_line(finished_copy: Path, posttrain: Any, earlier: str) -> None:
    root = finished_copy
    for share in ("0%", "100%", "-5%", "1.5", "ten", "nan", "%"):
        mistake = posttrain("models", "promote", earlier, "--canary", share, "-w", root).mistake
        assert mistake.startswith(f"--canary: `{share}` is not a share")
    for arguments, mistake in (
        (("models", "canary"), "there was no canary yet; posttrain models promote MODEL --canary 10%"),
        (("models", "canary", "--stop"), "there was no canary yet; posttrain models promote MODEL --canary 10%"),
        (("models", "promote", "model-x", "--canary", "10%"), "nothing here is called `model-x`"),
    ):
        assert posttrain(*arguments, "-w", root).mistake.startswith(mistake)
    config = root / "posttrain.yaml"
    config.write_text(config.read_text() + "deploy: {canary: {margin: 0}}\n")
    assert "deploy.canary.margin" in posttrain("models", "canary", "-w", root).mistake
