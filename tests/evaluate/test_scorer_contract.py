"""Every scorer of a suite fulfils the contract that docs/extending.md publishes."""

from pathlib import Path

import pytest

from posttrain.evaluate.config import SuiteConfig
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import TaskConfig
from posttrain.testing.scorers import ScorerContract
from posttrain.testing.scores import tiny_language_model

SUITES = {
    "exact_match": SuiteConfig(scorer="exact_match"),
    "regex": SuiteConfig(scorer="regex", pattern="[aeiou]+"),
    "token_f1": SuiteConfig(scorer="token_f1"),
    "perplexity": SuiteConfig(scorer="perplexity"),
    "python": SuiteConfig(scorer="python", function="answer_length:score"),
}


class TestScorersOfText(ScorerContract):
    @pytest.fixture(params=sorted(SUITES))
    def suite(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuiteConfig:
        (tmp_path / "answer_length.py").write_text("def score(answer, expected, prompt):\n    return len(answer)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return SUITES[request.param]


class TestScorersOfLabels(ScorerContract):
    @pytest.fixture(params=["exact_match", "label_likelihood"])
    def suite(self, request: pytest.FixtureRequest) -> SuiteConfig:
        return SuiteConfig(scorer=request.param)

    @pytest.fixture
    def lm(self, tmp_path: Path) -> LanguageModel:
        return tiny_language_model(tmp_path / "tiny", TaskConfig(labels=["lost card", "refund"], max_new_tokens=4))
