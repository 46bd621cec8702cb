"""Commands that write, killed at moments of their own work: the same command again finishes them."""

from pathlib import Path

import pytest
from killed_verbs import VERBS
from kills import attack

pytestmark = pytest.mark.slow


COUNTS = {
    **dict.fromkeys(("rollback", "rollback --to", "promote"), 12),
    **dict.fromkeys(("data add", "backup", "restore"), 4),
    **dict.fromkeys(("run", "train"), 1),  # seconds each
}


@pytest.mark.parametrize("verb", list(VERBS))
def test_a_killed_command_typed_again_ends_as_if_it_had_not_been_killed(verb: str, tmp_path: Path) -> None:
    result = attack(VERBS[verb], tmp_path, COUNTS[verb])
    assert result.differences == []
    assert result.killed >= COUNTS[verb]
