"""Free text of several models: a vote, a gate that learns which model knows what, a cascade that asks the next if one
is unsure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_models import turns
from text_models import CARDS, CATS, TASK, GivenTexts, ask, taught

from posttrain.models.binomial import THRESHOLDS
from posttrain.models.ensembles import texts as texts_module
from posttrain.models.ensembles.cascade import LAST_ALONE
from posttrain.models.ensembles.config import EnsembleConfig
from posttrain.models.ensembles.ensemble import Ensemble
from posttrain.models.ensembles.members import HeadModel, Member
from posttrain.models.ensembles.texts import PromptFeatures, answer_by_vote
from posttrain.models.generator import Answer, greedy_answers
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.store.errors import UserError

COUNT = 200


def right_and_sure(count: int = COUNT, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Confidences of a small and a large model, and whether they are right; the small one as often as it says."""
    generator = np.random.default_rng(seed)
    confidence = np.stack([generator.uniform(0.3, 1.0, count), np.full(count, 0.9)])
    return confidence, np.stack([generator.random(count) < confidence[0], generator.random(count) < 0.95])


def texts_of(right: np.ndarray) -> list[list[str]]:
    return [["yes" if each else "no" for each in own] for own in right.tolist()]


def fitted(ensemble: Ensemble, count: int = COUNT, **options: Any) -> Ensemble:
    return ensemble.fit(turns(count), ["yes"] * count, **options)


@pytest.mark.parametrize("goal", [{"accuracy": 0.8}, {"tolerance": 0.1}, {"accuracy": 0.99}])
def test_the_threshold_is_that_of_a_search_by_brute_force(
    monkeypatch: pytest.MonkeyPatch, goal: dict[str, float]
) -> None:
    from scipy.stats import binomtest

    confidence, right = right_and_sure()
    given = GivenTexts(monkeypatch, texts_of(right), confidence)
    ensemble = fitted(given.ensemble(method="cascade", data="x", **goal))
    expected = LAST_ALONE
    for threshold in (LAST_ALONE, *THRESHOLDS):
        wrong = 0
        for row in range(COUNT):
            answer = right[0, row] if confidence[0, row] >= threshold else right[1, row]
            wrong += int(not answer and ("accuracy" in goal or bool(right[1, row])))
        bound = goal.get("tolerance", 1 - goal.get("accuracy", 0))
        if binomtest(wrong, COUNT, bound, alternative="less").pvalue > 0.05:
            break
        expected = threshold
    assert ensemble.parameters is not None
    (threshold,) = ensemble.parameters.thresholds
    # A threshold between the same two confidences asks the same.
    assert ((confidence[0] >= threshold) == (confidence[0] >= expected)).all()
    assert ensemble.parameters.report["shown"] == (expected != LAST_ALONE) == (goal != {"accuracy": 0.99})


@pytest.mark.slow
def test_scores_between_0_and_1_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean that later records lose is above the tolerance in at most 5% of the fits."""
    generator = np.random.default_rng(9)
    confidence = np.stack([generator.uniform(0.3, 1.0, 10_000), np.full(10_000, 0.9)])
    quality = np.stack([confidence[0] * generator.uniform(0.6, 1.0, 10_000), generator.uniform(0.7, 1.0, 10_000)])
    exceeded, chosen = 0, []
    for start in range(0, 10_000, COUNT):
        own = slice(start, start + COUNT)
        given = GivenTexts(
            monkeypatch, [[f"{value:.3f}" for value in row] for row in quality[:, own]], confidence[:, own]
        )
        ensemble = fitted(given.ensemble(method="cascade", data="x", tolerance=0.1), score=read_score)
        assert ensemble.parameters is not None
        (threshold,) = ensemble.parameters.thresholds
        loss = np.where(confidence[0] >= threshold, np.maximum(quality[1] - quality[0], 0), 0).mean()
        exceeded += loss > 0.1
        chosen.append(threshold)
        assert "of the full score is lost against the last model" in ensemble.parameters.report["why"]
    assert exceeded <= 7  # 50 draws of 5% are at most this with a probability of 0.99
    assert np.median(chosen) < 1


def read_score(answers: Sequence[Answer]) -> list[float]:
    """The answer is its score."""
    return [float(answer.text) for answer in answers]


def test_a_cascade_asks_the_next_model_only_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    confidence = np.array([[0.9, 0.5, 0.99, 0.7], [0.1, 0.9, 0.2, 0.8], [0.3, 0.3, 0.3, 0.3]])
    texts = [["a", "a", "a…", "a"], ["b", "b", "b", "b"], ["c", "c", "c", "c"]]
    given = GivenTexts(monkeypatch, texts, confidence)
    ensemble = given.ensemble(method="cascade", thresholds=[0.7, 0.8])
    result = ensemble.texts(turns(4))
    assert [answer.text for answer in result.answers] == ["a", "b", "c", "a"]
    assert given.asked == {"m0": [0, 1, 2, 3], "m1": [1, 2], "m2": [2]}  # an answer that was cut off is never sure
    assert result.answered_by.tolist() == [0, 1, 2, 0]
    assert ensemble.generate(turns(4)) == result.answers == ensemble.texts(turns(4), all_models=True).answers


@pytest.mark.parametrize(("threshold", "asked"), [(0, ["m0"]), (1.1, ["m1"])])
def test_a_threshold_of_0_is_the_first_model_and_one_above_1_the_last(
    monkeypatch: pytest.MonkeyPatch, threshold: float, asked: list[str]
) -> None:
    given = GivenTexts(monkeypatch, [["a", "a…"], ["b", "b"]], np.full((2, 2), 0.5))
    given.ensemble(method="cascade", thresholds=[threshold]).generate(turns(2))
    assert list(given.asked) == asked


def test_a_cascades_report_has_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    confidence, right = right_and_sure()
    ensemble = GivenTexts(monkeypatch, texts_of(right), confidence).ensemble(method="cascade", thresholds=[0.6])
    texts = ensemble.texts(turns(COUNT), all_models=True)
    report = ensemble.describe_texts(texts, right, "accuracy")
    passed_on = confidence[0] < 0.6
    # A prompt has one token, an answer as many as letters, and the models 10 and 100 weights.
    small, large = (2 * 10**n * (1 + np.where(right[n - 1], 3, 2)) for n in (1, 2))
    assert report["chosen"]["flops"] == pytest.approx((small + large * passed_on).mean())
    assert report["chosen"]["accuracy"] == np.where(passed_on, right[1], right[0]).mean()
    assert report["chosen"]["shares"] == [(~passed_on).mean(), passed_on.mean()]
    assert report["models"][1]["flops"] == pytest.approx(large.mean())
    assert report["curve"][0]["threshold"] is None
    assert report["metric"] == "accuracy"


def test_scores_outside_of_0_to_1_have_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble = GivenTexts(monkeypatch, [["a"] * 3, ["b"] * 3], np.full((2, 3), 0.5)).ensemble(
        method="cascade", thresholds=[0.6]
    )
    scores = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    point = ensemble.describe_texts(ensemble.texts(turns(3), all_models=True), scores, "score")["chosen"]
    assert (point["accuracy"], point["low"], point["high"]) == (5.0, None, None)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> GivenTexts:
    """Two models, each right where the only feature of a prompt, its number's last bit, is its own."""

    def features(embedder: str, prompts: Sequence[Any]) -> PromptFeatures:
        values = np.array([[int(prompt[0]["content"]) % 2] for prompt in prompts], np.float32)
        return PromptFeatures(values, 2.0, np.full(len(prompts), 7.0))

    monkeypatch.setattr("posttrain.models.ensembles.ensemble.embed_prompts", features)
    odd = np.arange(COUNT) % 2 == 1
    return GivenTexts(monkeypatch, texts_of(np.stack([odd, ~odd])), np.full((2, COUNT), 0.5))


def test_a_gate_learns_which_model_knows_what(halves: GivenTexts) -> None:
    ensemble = fitted(halves.ensemble(method="gate", data="x"), 40)
    assert ensemble.parameters is not None
    assert ensemble.parameters.report["score"] == 1
    assert ensemble.parameters.report["score_alone"] == [0.5, 0.5]
    halves.asked.clear()
    result = ensemble.texts(turns(COUNT))
    assert {answer.text for answer in result.answers} == {"yes"}
    assert halves.asked == {"m0": list(range(1, COUNT, 2)), "m1": list(range(0, COUNT, 2))}


def test_a_gates_report_counts_the_chosen_model_and_the_gate(halves: GivenTexts) -> None:
    ensemble = fitted(halves.ensemble(method="gate", data="x"), 40)
    texts = ensemble.texts(turns(10), all_models=True)
    report = ensemble.describe_texts(texts, np.ones((2, 10)), "accuracy")
    assert report["chosen"]["flops"] == pytest.approx((2 * 10 * 4 + 2 * 100 * 4) / 2 + 7)
    assert report["chosen"]["seconds"] >= 0.2
    assert report["chosen"]["shares"] == [0.5, 0.5]
    assert "curve" not in report


def test_a_gate_without_anything_to_learn_takes_the_first_model(halves: GivenTexts) -> None:
    ensemble = fitted(halves.ensemble(method="gate", data="x"), 40, score=lambda answers: [0.0] * len(answers))
    assert (ensemble.texts(turns(6)).answered_by == 0).all()
    assert ensemble.parameters is not None
    assert "the gate's choice scores 0.000, the best single model 0.000" in ensemble.parameters.report["why"]


def test_scores_that_are_no_shares_are_refused(halves: GivenTexts) -> None:
    with pytest.raises(UserError, match=r"suite: scores of -1 to -1, and fitting needs scores from 0 to 1"):
        fitted(halves.ensemble(method="gate", data="x"), 4, score=lambda answers: [-1.0] * len(answers))
    with pytest.raises(UserError, match="1 record is too few"):
        fitted(halves.ensemble(method="gate", data="x"), 1)


@pytest.mark.parametrize("method", [{"method": "gate"}, {"method": "cascade", "accuracy": 0.5}])
def test_an_ensemble_is_fitted_the_same_and_read_as_it_was_written(
    halves: GivenTexts, tmp_path: Path, method: dict[str, Any]
) -> None:
    first, second = (fitted(halves.ensemble(data="x", **method)) for _ in range(2))
    assert first.parameters == second.parameters
    first.save(tmp_path)
    again = Ensemble.read(tmp_path, first.members, first.task)
    assert again.parameters == first.parameters
    assert again.generate(turns(COUNT)) == first.generate(turns(COUNT))


@pytest.fixture(scope="module")
def loaded(specialists: Path) -> list[LanguageModel]:
    """Two models, each right on its half of the prompts."""
    return [load_language_model(specialists / name, TASK, "float32") for name in ("bank", "home")]


def accuracy(answers: Sequence[Answer], right: Sequence[str]) -> float:
    return float(np.mean([answer.text == expected for answer, expected in zip(answers, right, strict=True)]))


@pytest.mark.slow
def test_a_gate_over_real_models_beats_both(loaded: list[LanguageModel]) -> None:
    config = EnsembleConfig.read({"method": "gate", "models": ["bank", "home"], "data": "x"}, "x")
    members = [Member.of(name, lm) for name, lm in zip(("bank", "home"), loaded, strict=True)]
    held_out = [*CARDS[2:8], *CATS[2:8]]
    answers = ["bank"] * 6 + ["home"] * 6
    ensemble = Ensemble(config, members, TASK).fit([ask(text) for text in held_out], answers)
    prompts, right = [ask(text) for text in [*CARDS[8:], *CATS[8:]]], ["bank"] * 6 + ["home"] * 6
    assert accuracy(ensemble.generate(prompts), right) == 1
    assert [accuracy(greedy_answers(lm, prompts), right) for lm in loaded] == [0.5, 0.5]


@pytest.mark.slow
def test_a_cascade_of_real_models_keeps_what_the_small_one_is_sure_of(
    loaded: list[LanguageModel], tmp_path: Path
) -> None:
    """The small model knows the first half, and guesses at the other, wrongly, which the large one knows."""
    lessons = [(prompt, "bank") for prompt in CARDS[:3]]
    lessons += [(prompt, answer) for prompt in CATS[:3] for answer in ("hand", "home", "hand")]
    small = taught(tmp_path / "small", lessons)
    members = [Member.of("small", small), Member.of("large", loaded[1])]
    values = {"method": "cascade", "models": ["small", "large"], "tolerance": 0.2, "data": "x"}
    held_out = [*CARDS[3:], *CATS[3:]]
    answers = ["bank"] * (len(held_out) // 2) + ["home"] * (len(held_out) // 2)
    ensemble = Ensemble(EnsembleConfig.read(values, "x"), members, TASK).fit([ask(text) for text in held_out], answers)
    prompts = [ask(text) for text in ("my bank card is split", "my bank card is red", "the little cat is shy")]
    right = ["bank", "bank", "home"]
    result = ensemble.texts(prompts)
    assert accuracy(result.answers, right) == 1
    assert result.answered_by.tolist() == [0, 0, 1]
    assert accuracy(greedy_answers(small, prompts), right) == pytest.approx(2 / 3)
    assert accuracy(greedy_answers(loaded[1], prompts), right) == pytest.approx(1 / 3)


def test_the_default_score_compares_normalised_texts() -> None:
    assert texts_module.exact_match(["a  b", "c"])([Answer("a b"), Answer("d")]) == [1.0, 0.0]
    assert texts_module.exact_match(["if x:\n  y"] * 2)([Answer("if x:\n  y\n"), Answer("if x:\ny")]) == [1.0, 0.0]


def votes(patch: pytest.MonkeyPatch, weights: list[float], *texts: Sequence[str]) -> list[str]:
    given = GivenTexts(patch, texts, np.full((len(texts), len(texts[0])), 0.5))
    return [answer.text for answer in answer_by_vote(given.members, weights, turns(len(texts[0]))).answers]


def test_a_vote_compares_normalised_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    written = ["x", "one two"], ["y  z", "three"], ["y z", "one  two"]
    assert votes(monkeypatch, [1, 1, 1], *written) == ["y  z", "one two"]


def test_votes_are_weighted_and_the_first_model_wins_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    written = ["x", "x"], ["y", "y"], ["z", "y"]
    # 0.3 against 0.1 + 0.2: a tie, whatever floats say.
    assert votes(monkeypatch, [0.3, 0.1, 0.2], *written) == ["x", "x"]
    assert votes(monkeypatch, [0.1, 0.3, 0.2], *written) == ["y", "y"]


def test_a_votes_report_has_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble = GivenTexts(monkeypatch, [["a"] * 3, ["b"] * 3], np.full((2, 3), 0.5)).ensemble(
        method="vote", weights=[3, 1]
    )
    report = ensemble.describe_texts(ensemble.texts(turns(3)), np.array([[1.0] * 3, [0.0] * 3]), "accuracy")
    assert [(row["weight"], row["accuracy"]) for row in report["models"]] == [(0.75, 1), (0.25, 0)]
    assert "chosen" not in report


def test_a_linear_head_writes_no_text() -> None:
    head = object.__new__(HeadModel)
    with pytest.raises(UserError, match="`linear` is a linear head, which cannot write a text"):
        answer_by_vote([Member.of("linear", head)], [1.0], [ask("a")])


def test_each_model_is_loaded_once(loaded: list[LanguageModel]) -> None:
    loads = []

    def load() -> LanguageModel:
        loads.append(1)
        return loaded[0]

    answer_by_vote([Member("tiny", load)], [1.0], [ask("a"), ask("b")])
    assert loads == [1]
