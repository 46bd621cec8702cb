"""Commands that change the champion, killed at moments of their own work: the same command again finishes them."""

from pathlib import Path

import pytest
from kills import VERBS, attack

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("verb", ["rollback", "rollback --to", "promote"])
def test_a_killed_command_typed_again_ends_as_if_it_had_not_been_killed(verb: str, tmp_path: Path) -> None:
    result = attack(VERBS[verb], tmp_path, count=12)
    assert result.differences == []
    assert result.killed >= 12
