"""Searches over real merges: what is found, what a killed search does again, and mistakes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_family import write_relative

from posttrain.merge.recipe import Recipe
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.tune.merges import search as search_module
from posttrain.tune.merges.search import search_recipe
from posttrain.tune.merges.suites import MergeSuite, read_merge_suites, score_suite
from posttrain.tune.trial import TrialState

pytestmark = pytest.mark.slow

SEARCH = {"suites": ["prefer=pairs.jsonl"], "trials": 5, "sampler": {"name": "gp", "startup": 2}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, ``a`` and ``b``, trained from it, as it were, and preference pairs."""
    root = tmp_path_factory.mktemp("search")
    write_tiny_model(root / "base")
    for seed, name in enumerate("ab", 1):
        write_relative(root / name, root / "base", seed, scale=0.05)
    words = ["card", "cash", "loan"]
    pairs = [{"prompt": f"{n} of my {words[n % 3]}", "chosen": words[n % 3], "rejected": "none"} for n in range(24)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (root / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs[:6]))
    return root


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of records of each part that was scored."""
    counts: list[int] = []

    def counted(lm: Any, suite: MergeSuite) -> Any:
        counts.append(suite.records.num_rows)
        return score_suite(lm, suite)

    monkeypatch.setattr(search_module, "score_suite", counted)
    return counts


def recipe(**values: Any) -> Recipe:
    return Recipe.read({"method": "task_arithmetic", "base": "base", "models": ["a", "b"], **values}, "test")


def test_a_search_stops_trials_and_reports_on_the_other_half(models: Path, tmp_path: Path, scored: list[int]) -> None:
    report = search_recipe(recipe(search=SEARCH), models, tmp_path / "study")
    first, best = report.trials[0], report.best
    assert first.settings == {"weight 1": 1.0, "weight 2": 1.0}
    assert len(report.trials) == 5
    finished = [trial for trial in report.trials if trial.state is TrialState.FINISHED]
    assert best in finished
    assert best.value == max(trial.value or -1 for trial in finished)
    # Parts of half of the 24 records; a trial that is behind is not read to its end.
    assert set(scored) == {3}
    assert len(scored) == sum(trial.step for trial in report.trials) < 20
    assert report.to_dict()["stopped_early"] == 5 - len(finished) > 0
    assert report.gains["prefer"].n == 12, "half of the records"
    assert report.recipe.search is None
    assert [entry.parameters["weight"] for entry in report.recipe.models] == list(best.settings.values())


def test_the_value_of_a_trial_is_the_mean_of_its_records(models: Path, tmp_path: Path) -> None:
    one = recipe(models=["a"], search={**SEARCH, "trials": 1, "space": {"scale": [0.5, 1.5]}})
    report = search_recipe(one, models, tmp_path / "study")
    (suite,) = read_merge_suites(["prefer=pairs.jsonl"], models, {})
    searched, _ = search_module._halves(suite)
    lm = search_module.load_language_model(models / "a", searched.task, "float32")
    part = search_module._part(searched, 1)
    scores = score_suite(lm, part).predictions["score"].to_pylist()
    assert report.best.reports[0].value == pytest.approx(sum(scores) / len(scores))


@pytest.mark.parametrize("after", [1, 3, 7])
def test_a_killed_search_does_no_finished_work_again(
    models: Path, tmp_path: Path, scored: list[int], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    searched = recipe(search=SEARCH)
    whole = search_recipe(searched, models, tmp_path / "whole")
    count = len(scored)
    scored.clear()
    write: Callable[..., None] = search_module.write_atomically

    def killed(*arguments: Any) -> None:
        write(*arguments)
        if len(scored) == after:
            raise KeyboardInterrupt  # between a part's scores and their report

    with monkeypatch.context() as patch:
        patch.setattr(search_module, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            search_recipe(searched, models, tmp_path / "study")
    again = search_recipe(searched, models, tmp_path / "study")
    assert again.to_dict() == whole.to_dict()
    assert len(scored) == count
    finished = len(scored)
    assert search_recipe(searched, models, tmp_path / "study").to_dict() == whole.to_dict()
    assert len(scored) == finished


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"search": {"suites": ["few.jsonl"]}}, "few: has 6 records; give at least 8"),
        ({"search": {}}, "names no suites"),
        ({"search": {**SEARCH, "sampler": "gp2"}}, "there is no sampler `gp2`"),
        ({"search": {**SEARCH, "space": {"scale": [1, 1]}}}, "search.space.scale"),
        ({"search": SEARCH, "models": ["a", "c"]}, "c"),
    ],
)
def test_a_mistake_is_named_before_any_trial(
    models: Path, tmp_path: Path, scored: list[int], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        search_recipe(recipe(**values), models, tmp_path / "study")
    assert not scored
    assert not list(tmp_path.iterdir())


def test_the_study_of_another_search_is_refused(models: Path, tmp_path: Path) -> None:
    one = recipe(search={**SEARCH, "trials": 1})
    search_recipe(one, models, tmp_path / "study")
    with pytest.raises(UserError, match="study"):
        search_recipe(one.model_copy(update={"dtype": "float32"}), models, tmp_path / "study")
