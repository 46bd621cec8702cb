"""Mutated configs end in exit code 0, or in 2 and one line."""

import logging
from collections.abc import Iterator
from pathlib import Path

import config_fuzz
import pytest
import yaml


@pytest.fixture(autouse=True)
def _logger() -> Iterator[None]:
    """Restores the logger, which each command sets up."""
    logger = logging.getLogger("posttrain")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.mark.slow
def test_every_config_ends_in_success_or_a_clear_line(tmp_path: Path) -> None:
    counts, failures = config_fuzz.attack(tmp_path, count=80)
    assert failures == []
    assert {kind for kind, _ in counts} == set(config_fuzz.MUTATIONS)
    assert {code for _, code in counts} == {0, 2}


@pytest.mark.slow
def test_the_fuzzer_starts_from_a_config_that_is_right(tmp_path: Path) -> None:
    config_fuzz.prepare(tmp_path)
    content = yaml.safe_dump(config_fuzz.BASE, sort_keys=False).encode()
    assert config_fuzz.outcome(tmp_path, content) == (0, "")
