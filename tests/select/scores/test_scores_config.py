"""Checks of the configured scores before any work."""

import subprocess
import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from posttrain.select.config import SelectConfig
from posttrain.select.scores.registry import BASE_MEASURES, SCORES, uncertainty_sign
from posttrain.select.selectors.registry import select
from posttrain.store.errors import UserError


def test_only_the_scores_that_the_strategy_needs_are_computed_by_default() -> None:
    assert SelectConfig().wanted_scores() == []
    by_perplexity = SelectConfig(strategy="mmr", options={"by": "perplexity"}, scores=["loss"])
    assert by_perplexity.wanted_scores() == ["loss", "perplexity"]
    assert SelectConfig(strategy="mmr", options={"by": "margin"}).wanted_scores() == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"scores": ["perplexiti"]}, "no score `perplexiti`; did you mean `perplexity`"),
        ({"scores": ["entropy"]}, "`entropy` is always computed"),
    ],
)
def test_unknown_names_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SelectConfig.read(section, "posttrain.yaml")


@pytest.mark.slow
def test_every_score_is_described_without_the_libraries_that_compute_it() -> None:
    """The keys of finished scores, and their groups: reading them from the cache needs nothing else."""
    code = """
import sys
from importlib import import_module
from posttrain.loop.stages import score, select
from posttrain.select.scores import answers, labels, table
from posttrain.select.scores.registry import SCORES
for spec in SCORES.values():
    assert isinstance(spec.function, str)
    import_module(spec.function.partition(":")[0])
groups = [answers.likelihood_group(), answers.perplexity_group(), labels.label_group(["a"])]
print(len(groups), sorted({"torch", "transformers", "scipy", "sklearn"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "3 []\n", done.stderr


@pytest.mark.parametrize("name", sorted(SCORES))
def test_a_score_is_refused_on_the_other_kind_of_task(name: str) -> None:
    config = SelectConfig(scores=[name])
    for has_labels, refused in ((True, "text"), (False, "labels")):
        if SCORES[name].task == refused:
            with pytest.raises(UserError, match=f"^select.scores: score `{name}`"):
                config.check(has_labels)
        else:
            config.check(has_labels)


@pytest.mark.parametrize("name", sorted(name for name, spec in SCORES.items() if spec.task == "labelled"))
def test_scores_that_need_labels_cannot_choose_from_the_pool(name: str) -> None:
    with pytest.raises(UserError, match=f"score `{name}` needs the right answer, which no pool record has"):
        SelectConfig(strategy="top", options={"by": name}).check(True)


@pytest.mark.parametrize("strategy", ["top", "mmr", "facility_location", "uncertain_diverse"])
def test_strategies_may_choose_by_every_score_of_the_pool(strategy: str) -> None:
    for name in sorted(name for name in {*BASE_MEASURES, *SCORES} - {"margin"} if uncertainty_sign(name)):
        task_kind = SCORES[name].task if name in SCORES else "any"
        SelectConfig(strategy=strategy, options={"by": name}).check(task_kind != "text")


@pytest.mark.parametrize("name", SCORES)
def test_every_score_has_a_scorer(name: str) -> None:
    module, _, function = str(SCORES[name].function).partition(":")
    assert callable(getattr(import_module(module), function))


def test_relevance_is_high_where_the_model_is_uncertain() -> None:
    scores = {"confidence": np.array([0.9, 0.2, 0.5]), "least_confidence": np.array([0.1, 0.3, 0.2])}
    options = {"relevance": 1.0, "dimensions": None}
    table = {**scores, "embeddings": np.eye(3)}
    assert select("mmr", table, 3, by="confidence", **options).tolist() == [1, 2, 0]
    assert select("mmr", table, 3, by="least_confidence", **options).tolist() == [1, 2, 0]
    with pytest.raises(UserError, match=r"no score column `perplexity` to choose by; add it to select\.scores"):
        select("mmr", table, 3, by="perplexity", **options)


def test_a_missing_sentence_model_is_named() -> None:
    with pytest.raises(UserError, match=r"select\.embeddings: `nothing` is not an embedder"):
        SelectConfig(embeddings="nothing").check_models()
