"""`posttrain verify` finds each damage of a workspace and invents none."""

from pathlib import Path
from typing import Any

import pytest
from damages import DAMAGES, build_workspace, damage_copies

pytestmark = pytest.mark.slow


def test_every_kind_of_damage_is_found(small: Any, tmp_path: Path) -> None:
    original = build_workspace(small)
    (tmp_path / "copies").mkdir()
    result = damage_copies(original, tmp_path / "copies", len(DAMAGES), seed=21)
    assert result.problems == []
    assert result.detected.keys() == {"none", *DAMAGES}
