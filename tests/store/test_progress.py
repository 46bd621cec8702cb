"""Lines of progress."""

import logging

import pytest

from posttrain.store import progress


def test_a_line_shows_the_message_of_the_caller(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with caplog.at_level(logging.INFO, "posttrain"), progress.progress_bar("training", 100, "steps") as advance:
        now = 20.0
        advance(40, "loss 1.234")
        now = 40.0
        advance(20)
    assert caplog.messages == [
        "  training: 40/100, 2.0 steps/s, loss 1.234, 30 s left",
        "  training: 60/100, 1.5 steps/s, 27 s left",
    ]


def test_a_nested_bar_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "posttrain"),
        progress.progress_bar("outer", 2),
        progress.progress_bar("inner", 2) as advance,
    ):
        advance(1, "loss 1")
    assert not caplog.messages


def test_a_bar_shows_the_message_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress._bar("training", 100, "steps") as advance:
        advance(40, "loss 1.234")
    assert "loss 1.234" in capsys.readouterr().err
