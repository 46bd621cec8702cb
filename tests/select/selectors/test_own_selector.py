"""A selector from outside the package covers, and is a cold start, where its entry says so."""

from pathlib import Path

import pytest

from posttrain.select.config import SelectConfig
from posttrain.store.errors import UserError

_MODULE = """
from posttrain.select.selectors.registry import SelectorSpec

def last(pool, n, seed, skip=0):
    pool.check_counts(skip=skip or None)
    return pool.unlabelled_rows[::-1][skip:][:n]

COVER = SelectorSpec(last, covers=True, needs_scores=False)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_selector.py").write_text(_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_one_that_covers_chooses_from_unscored_records_and_before_a_model_is_trained() -> None:
    config = SelectConfig(strategy="own_selector:COVER", pool_embedded=5000)
    config.check(has_labels=True)
    assert [config.embedding_limit(cold) for cold in (True, False)] == [5000, 5000]
    assert config.batch_strategy(cold=True).name == "own_selector:COVER"


def test_a_plain_function_needs_scores_and_covers_nothing() -> None:
    config = SelectConfig(strategy="own_selector:last", pool_sample=300, pool_embedded=5000)
    assert config.embedding_limit(cold=False) == 300
    assert config.batch_strategy(cold=True).name == "facility_location"


def test_it_checks_its_own_options() -> None:
    config = SelectConfig(strategy="own_selector:last", options={"skip": -1})
    with pytest.raises(UserError, match="strategy `own_selector:last`: `skip` is -1, and must be a whole number"):
        config.check(has_labels=True)
