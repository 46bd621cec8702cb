"""The linear head against scikit-learn, its calibration on records that it has not learned from, and its files."""

from pathlib import Path

import numpy as np
import pytest

from posttrain.models.calibration import expected_calibration_error
from posttrain.models.linear_head import SETTINGS, WEIGHTS, FittedHead, LinearHead, fit_linear_head
from posttrain.store.errors import UserError

LABELS = ["d", "a", "c", "b", "unseen"]


def clouds(count: int, classes: int = 4, spread: float = 0.9, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Embeddings of length 1 around a centre for each label; the clouds overlap."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, 12))
    truth = rng.integers(classes, size=count)
    points = centres[truth] + rng.normal(scale=spread * 2, size=(count, 12))
    return points / np.linalg.norm(points, axis=1, keepdims=True), [LABELS[index] for index in truth]


def fit(points: np.ndarray, answers: list[str], seed: int = 0) -> FittedHead:
    fitted = fit_linear_head(points, answers, LABELS, [str(row) for row in range(len(answers))], seed=seed)
    assert fitted is not None
    return fitted


@pytest.mark.parametrize("classes", [2, 4])
def test_probabilities_are_those_of_scikit_learn_at_the_temperature(classes: int) -> None:
    from scipy.special import softmax
    from sklearn.linear_model import LogisticRegression

    points, answers = clouds(200, classes)
    head = fit(points, answers).head
    assert head.labels == tuple(LABELS[:classes])
    model = LogisticRegression(C=head.report["inverse_penalty"], tol=1e-7, max_iter=5000).fit(points, answers)
    decision = model.decision_function(points)
    logits = np.stack([-decision, decision], 1) / 2 if classes == 2 else decision
    expected = softmax(logits / head.report["temperature"], axis=1)
    columns = [list(model.classes_).index(label) for label in head.labels]
    np.testing.assert_allclose(head.probabilities(points), expected[:, columns], atol=1e-3)


def test_confidence_out_of_fold_is_the_accuracy_on_new_records() -> None:
    points, answers = clouds(600)
    fitted = fit(points, answers)
    new_points, new_answers = clouds(4000, seed=1)
    probabilities = fitted.head.probabilities(new_points)
    right = np.array(fitted.head.labels)[probabilities.argmax(1)] == np.array(new_answers)
    assert abs(fitted.head.report["accuracy"] - right.mean()) < 0.05
    assert expected_calibration_error(probabilities.max(1), right) < 0.05
    assert fitted.head.report["ece"] < 0.06
    # Those of the training records themselves are overconfident, which is why they are not used.
    own = fitted.head.probabilities(points).argmax(1)
    assert (np.array(fitted.head.labels)[own] == np.array(answers)).mean() > fitted.head.report["accuracy"]


@pytest.mark.slow
def test_a_label_of_one_record_is_an_error_out_of_fold_and_no_harm_to_the_temperature() -> None:
    points, answers = clouds(120)
    plain = fit(points, answers)
    lonely = fit(np.concatenate([points, -points[:1]]), [*answers, "unseen"])
    assert lonely.out_of_fold[-1, lonely.head.labels.index("unseen")] == 0
    assert lonely.head.report["temperature"] == pytest.approx(plain.head.report["temperature"], rel=0.5)


@pytest.mark.parametrize("answers", [[], ["a"], ["a"] * 5, ["a", "b"], ["a", "a", "b"]])
def test_too_few_labels_give_no_head(answers: list[str]) -> None:
    points = np.eye(12)[: len(answers)]
    assert fit_linear_head(points, answers, LABELS, list(map(str, range(len(answers))))) is None


def test_copies_of_one_input_are_one_record_to_the_folds() -> None:
    assert fit_linear_head(np.ones((4, 3)), ["a", "a", "b", "b"], LABELS, ["x", "x", "y", "y"]) is None


@pytest.mark.slow
def test_a_saved_head_is_the_same_and_fitted_again_has_the_same_bytes(tmp_path: Path) -> None:
    points, answers = clouds(100)
    for name in ("one", "two"):
        fit(points, answers).head.save(tmp_path / name)
    for file in (SETTINGS, WEIGHTS):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    loaded, head = LinearHead.load(tmp_path / "one"), fit(points, answers).head
    assert (loaded.labels, loaded.report) == (head.labels, head.report)
    np.testing.assert_array_equal(loaded.probabilities(points), head.probabilities(points))


@pytest.mark.parametrize("damage", ["absent", "cut", "other version", "another label"])
def test_what_is_no_whole_head_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    points, answers = clouds(60)
    fit(points, answers).head.save(tmp_path)
    settings = (tmp_path / SETTINGS).read_text()
    if damage == "absent":
        (tmp_path / WEIGHTS).unlink()
    elif damage == "cut":
        (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-9])
    elif damage == "other version":
        (tmp_path / SETTINGS).write_text(settings.replace('"version": 1', '"version": 2'))
    else:
        (tmp_path / SETTINGS).write_text(settings.replace('"a",', '"a", "e",'))
    with pytest.raises(UserError, match="linear head") as error:
        LinearHead.load(tmp_path)
    assert "\n" not in str(error.value)
