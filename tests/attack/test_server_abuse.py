"""The feedback server under abuse: nothing acknowledged is lost, and honest clients are served."""

from pathlib import Path

import pytest
from server_abuse import abuse_server
from server_attacks import ALLOWED

pytestmark = pytest.mark.slow


def test_abuse_neither_stops_the_server_nor_loses_an_entry(tmp_path: Path) -> None:
    result = abuse_server(tmp_path, seconds=5, rounds=2)
    assert result.problems == []
    assert result.acknowledged
    assert {name for name, _ in result.attacks} == {abuse.__name__ for abuse in ALLOWED}
    # Slow clients are closed for their slowness, not only when there are too many.
    for name in ("slow_head", "slow_body", "slow_chunks", "silent"):
        assert result.attacks[name, "408"], result.attacks
