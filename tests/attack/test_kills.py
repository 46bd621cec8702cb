"""Commands that write, killed at moments of their own work: the same command again finishes them."""

from pathlib import Path

import pytest
from killed_verbs import VERBS
from kills import attack

pytestmark = pytest.mark.slow


COUNTS = {
    "rollback": 5,
    **dict.fromkeys(("rollback --to", "promote", "data add"), 3),
    **dict.fromkeys(("backup", "restore"), 2),
    **dict.fromkeys(("run", "train"), 1),  # seconds each
}


@pytest.mark.parametrize("verb", list(VERBS))
def test_a_killed_command_typed_again_ends_as_if_it_had_not_been_killed(verb: str, tmp_path: Path) -> None:
    result = attack(VERBS[verb], tmp_path, COUNTS[verb])
    assert result.differences == []
    assert result.killed >= COUNTS[verb]
