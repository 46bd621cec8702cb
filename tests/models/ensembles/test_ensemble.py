"""An ensemble fits what its file wants, asks a cascade's models in turn, and answers as its formula says."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from label_models import GivenModels, random_logs, turns

from posttrain.models.embedder import Embedder
from posttrain.models.ensembles.ensemble import Ensemble
from posttrain.models.ensembles.members import HeadModel, Member
from posttrain.models.ensembles.pooling import linear_pool
from posttrain.models.ensembles.texts import PromptFeatures
from posttrain.models.language_model import LanguageModel
from posttrain.models.likelihood import label_scores
from posttrain.models.linear_head import LinearHead
from posttrain.models.task import TaskConfig, Turns
from posttrain.store.errors import UserError, WorkError
from posttrain.testing.scores import tiny_language_model


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> GivenModels:
    return GivenModels(monkeypatch)


def fitted(ensemble: Ensemble, truth: np.ndarray) -> Ensemble:
    labels = ensemble.task.label_set
    return ensemble.fit(turns(len(truth)), [labels[index] for index in truth])


def truth_of(logs: np.ndarray, seed: int = 0) -> np.ndarray:
    """Labels drawn from the probabilities of the last model."""
    generator = np.random.default_rng(seed)
    return np.array([generator.choice(logs.shape[2], p=np.exp(row)) for row in logs[-1]])


def test_given_weights_are_used(given: GivenModels) -> None:
    logs = random_logs(2, 12, 3)
    scores = given(logs, method="average", weights=[1, 3]).label_scores(turns(12))
    np.testing.assert_allclose(scores.log_probabilities, linear_pool(logs, [0.25, 0.75]))
    assert (scores.answered_by == -1).all()


@pytest.mark.parametrize(("threshold", "asked"), [(0, ["m0"]), (1.1, ["m1"])])
def test_a_threshold_of_0_is_the_first_model_and_one_above_1_the_last(
    given: GivenModels, threshold: float, asked: list[str]
) -> None:
    logs = random_logs(2, 12, 3)
    ensemble = given(logs, method="cascade", thresholds=[threshold])
    scores = ensemble.label_scores(turns(12))
    np.testing.assert_array_equal(scores.log_probabilities, logs[int(asked[0][-1])])
    assert list(given.asked) == asked


def test_a_cascade_asks_a_model_only_what_is_left(given: GivenModels) -> None:
    logs = random_logs(3, 60, 3)
    ensemble = given(logs, method="cascade", thresholds=[0.8, 0.6])
    scores = ensemble.label_scores(turns(60))
    confidence = np.exp(logs.max(axis=2))
    first, second = confidence[0] >= 0.8, confidence[1] >= 0.6
    assert given.asked["m1"] == np.flatnonzero(~first).tolist()
    assert given.asked["m2"] == np.flatnonzero(~first & ~second).tolist()
    np.testing.assert_array_equal(scores.answered_by, np.where(first, 0, np.where(second, 1, 2)))
    whole = ensemble.label_scores(turns(60), all_models=True)
    np.testing.assert_array_equal(scores.log_probabilities, whole.log_probabilities)
    np.testing.assert_array_equal(scores.answered_by, whole.answered_by)


def test_a_cascades_report_has_its_measured_cost(given: GivenModels) -> None:
    logs = random_logs(2, 40, 3)
    truth = truth_of(logs)
    ensemble = given(logs, method="cascade", thresholds=[0.8])
    report = ensemble.describe(ensemble.label_scores(turns(40), all_models=True), truth)
    passed_on = (np.exp(logs[0].max(axis=1)) < 0.8).mean()
    assert report["chosen"]["seconds"] == pytest.approx(1 + 10 * passed_on)
    assert report["chosen"]["flops_saved"] == pytest.approx(1 - (2 + 20 * passed_on) / 20)
    assert [row["seconds"] for row in report["models"]] == [1, 10]
    assert [row["threshold"] for row in report["models"]] == [0.8, None]
    assert [row["accuracy"] for row in report["models"]] == (logs.argmax(axis=2) == truth).mean(axis=1).tolist()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The group of each prompt, which is the only feature that a gate sees."""
    groups = np.random.default_rng(0).integers(0, 2, 300)

    def features(embedder: str, prompts: Sequence[Turns]) -> PromptFeatures:
        values = np.array([[groups[int(prompt[0]["content"])]] for prompt in prompts], np.float32)
        return PromptFeatures(values, 0.0, np.zeros(len(prompts)))

    monkeypatch.setattr("posttrain.models.ensembles.ensemble.embed_prompts", features)
    return groups


def test_a_gate_prefers_the_model_that_knows(given: GivenModels, group: np.ndarray) -> None:
    truth = np.random.default_rng(1).integers(0, 2, 300)
    # The first model is right in one group, the second in the other.
    right = np.where(np.eye(2, dtype=bool)[truth], 0.9, 0.1)
    logs = np.log(np.stack([np.where(group[:, None] == 0, right, 0.5), np.where(group[:, None] == 1, right, 0.5)]))
    ensemble = fitted(given(logs, method="gate", data="x"), truth)
    assert ensemble.parameters is not None
    report = ensemble.parameters.report
    scores = ensemble.label_scores(turns(300)).log_probabilities
    assert report["log_loss"] == pytest.approx(-scores[np.arange(300), truth].mean())
    assert report["log_loss"] < min(report["log_loss_alone"])
    assert report["log_loss"] == pytest.approx(-np.log(0.9), abs=0.05)


@pytest.mark.usefixtures("group")
def test_an_ensemble_is_read_as_it_was_written(given: GivenModels, tmp_path: Path) -> None:
    logs = random_logs(2, 50, 3)
    truth = truth_of(logs)
    for config in ({"method": "cascade", "tolerance": 0.3, "data": "x"}, {"method": "gate", "data": "x"}):
        ensemble = fitted(given(logs, **config), truth)
        ensemble.save(tmp_path)
        again = Ensemble.read(tmp_path, ensemble.members, ensemble.task)
        first, second = (each.label_scores(turns(50)).log_probabilities for each in (ensemble, again))
        np.testing.assert_array_equal(first, second)
    (tmp_path / "ensemble.json").write_text("{")
    with pytest.raises(WorkError, match="holds no readable ensemble"):
        Ensemble.read(tmp_path, ensemble.members, ensemble.task)


def test_records_that_cannot_be_fitted_are_refused(given: GivenModels) -> None:
    ensemble = given(random_logs(2, 5, 3), method="gate", data="x")
    with pytest.raises(UserError, match="too few"):
        ensemble.fit(turns(1), ["label 0"])
    with pytest.raises(UserError, match=r"label `other` is not in task\.labels"):
        ensemble.fit(turns(2), ["label 0", "other"])
    with pytest.raises(ValueError, match="not fitted"):
        ensemble.label_scores(turns(2))


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny_language_model(tmp_path_factory.mktemp("tiny"), TaskConfig(labels=["card", "cash"]))


class WordEmbedder:
    """Counts two words in place of a sentence model."""

    key = "words"

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.array([[text.count("card"), text.count("cash")] for text in texts], np.float32)


def head(labels: tuple[str, ...], embedder: str = "words") -> LinearHead:
    return LinearHead(labels, np.array([[4.0, 0.0], [0.0, 4.0]], np.float32), np.zeros(2, np.float32), embedder)


def test_one_language_model_is_that_model(lm: LanguageModel) -> None:
    from posttrain.models.ensembles.config import EnsembleConfig

    prompts = [[{"role": "user", "content": text}] for text in ("my card", "some cash here")]
    config = EnsembleConfig.read({"method": "average", "models": ["tiny"]}, "x")
    ensemble = Ensemble(config, [Member.of("tiny", lm)], lm.task)
    scores = ensemble.label_scores(prompts, exact=[0, 1])
    alone = label_scores(lm, prompts, lm.task.label_set, exact=[0, 1]).log_probabilities
    np.testing.assert_allclose(scores.log_probabilities, alone, atol=1e-6)
    weights = sum(p.numel() for p in lm.decoder.parameters()) - lm.model.get_input_embeddings().weight.numel()
    np.testing.assert_array_equal(scores.members.flops[0], [2 * weights * len(lm.prompt_ids(p)) for p in prompts])
    assert [answer.text for answer in ensemble.generate(prompts)] == [
        lm.task.label_set[index] for index in alone.argmax(axis=1)
    ]


def test_a_head_answers_in_the_tasks_order_of_labels() -> None:
    embedder: Embedder = WordEmbedder()  # type: ignore[assignment]
    model = HeadModel(head(("card", "cash")), embedder)
    prompts = [[{"role": "user", "content": "my card"}]]
    logs = model.log_probabilities(prompts, ["loan", "cash", "card"])
    expected = np.exp([0.0, 4.0]) / np.exp([0.0, 4.0]).sum()
    np.testing.assert_allclose(np.exp(logs[0, 1:]), expected, rtol=1e-6)
    assert np.exp(logs[0, 0]) == pytest.approx(1e-12)


def test_a_head_of_other_labels_or_embeddings_is_refused() -> None:
    embedder: Embedder = WordEmbedder()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"has the label `card`, which task\.labels lacks"):
        HeadModel(head(("card", "cash")), embedder).log_probabilities([], ["cash", "loan"])
    with pytest.raises(UserError, match="another sentence model"):
        HeadModel(head(("card", "cash"), "other"), embedder)
