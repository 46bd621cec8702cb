from typing import Any

import numpy as np
import pytest

from posttrain.attribution import CentroidUtility, ClassifierUtility, KNNUtility, RidgeUtility, data_oob, knn_shapley
from posttrain.attribution.utility import learning_task
from posttrain.store.errors import UserError

FEATURES = np.arange(12.0).reshape(6, 2)
LABELS = [0, 1, 2, 0, 1, 2]


def test_labels_are_numbered_in_sorted_order() -> None:
    task = learning_task(FEATURES[:3], ["pay", "card", "loan"], FEATURES[3:], ["card", "pay", "loan"])
    assert task.labels.tolist() == [2, 0, 1]
    assert task.evaluation_labels.tolist() == [0, 2, 1]
    assert task.classes == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": LABELS[:5]}, "labels must have one label for each of 6 rows"),
        ({"evaluation_labels": LABELS[:5]}, "evaluation_labels must have one label"),
        ({"evaluation_features": FEATURES[:, :1]}, "features have 2 columns, evaluation_features 1"),
        ({"features": np.where(FEATURES == 5, np.nan, FEATURES)}, "features has a value that is not finite, .* row 2"),
        (
            {"evaluation_features": np.where(FEATURES == 5, np.inf, 0)},
            "evaluation_features has a value that is not finite",
        ),
        ({"features": FEATURES[:, 0]}, "rows by columns"),
        ({"features": FEATURES[:0], "labels": []}, "rows by columns"),
        ({"labels": [0, 1, np.nan, 0, 1, 2]}, "labels has a value that is not finite"),
        ({"evaluation_labels": [0, 1, 1, 0, 1, 0]}, "class 2 has no evaluation record; add some"),
        ({"labels": [0, 1, 1, 0, 1, 0]}, "class 2 of the evaluation has no training record"),
    ],
)
def test_mistakes_in_the_data_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    data: dict[str, Any] = {
        "features": FEATURES,
        "labels": LABELS,
        "evaluation_features": FEATURES,
        "evaluation_labels": LABELS,
    }
    for make in (KNNUtility, RidgeUtility, CentroidUtility, knn_shapley):
        with pytest.raises(UserError, match=message) as caught:
            make(**{**data, **change})
        assert "\n" not in str(caught.value)


def test_mistakes_in_settings_are_refused() -> None:
    from sklearn.linear_model import RidgeClassifier

    data = FEATURES, LABELS, FEATURES, LABELS
    with pytest.raises(UserError, match="0 neighbours cannot vote"):
        KNNUtility(*data, neighbours=0)
    with pytest.raises(UserError, match="neighbours must be at least 1"):
        knn_shapley(*data, neighbours=0)
    with pytest.raises(UserError, match="no score `f1`"):
        KNNUtility(*data, score="f1")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no score `f1`"):
        ClassifierUtility(RidgeClassifier(), *data, score="f1")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="RidgeClassifier gives no probabilities"):
        ClassifierUtility(RidgeClassifier(), *data, score="log likelihood")
    for alpha in (0, -1, np.nan):
        with pytest.raises(UserError, match="alpha must be positive"):
            RidgeUtility(*data, alpha=alpha)
    with pytest.raises(UserError, match="labels must have one label"):
        data_oob(FEATURES, LABELS[:5])
    with pytest.raises(UserError, match="not finite"):
        data_oob(FEATURES * np.nan, LABELS)
