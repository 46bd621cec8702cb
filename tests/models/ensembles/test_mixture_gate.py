"""The gate's loss and gradient are the mixture's, and it equals EM."""

import numpy as np
import pytest
from label_models import random_logs

from posttrain.models.ensembles import mixture_gate
from posttrain.models.ensembles.mixture_gate import MixtureGate, fit_gate


def losses(gate: MixtureGate, features: np.ndarray, own: np.ndarray) -> np.ndarray:
    """-ln sum_m g_m(x_n) p_m(y_n), written out."""
    logits = (features - gate.mean) / gate.scale @ np.array(gate.weights).T + gate.bias
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return np.asarray(-np.log((weights * np.exp(own.T)).sum(axis=1)))


def test_weights_of_each_record_add_up_to_one() -> None:
    gate = fit_gate(np.random.default_rng(0).standard_normal((40, 5)), random_logs(3, 40, 2)[:, :, 0])
    weights = gate(np.random.default_rng(1).standard_normal((7, 5)))
    assert weights.shape == (7, 3)
    np.testing.assert_allclose(weights.sum(axis=1), 1)


def test_the_gradient_is_that_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.optimize import check_grad

    generator = np.random.default_rng(0)
    features, own, seen = generator.standard_normal((12, 3)), random_logs(2, 12, 4)[:, :, 1], []

    def minimize(loss, start, **options):  # type: ignore[no-untyped-def]
        at = generator.standard_normal(len(start))
        seen.append(check_grad(lambda x: loss(x)[0], lambda x: loss(x)[1], at))
        raise StopIteration

    monkeypatch.setattr("scipy.optimize.minimize", minimize)
    with pytest.raises(StopIteration):
        mixture_gate._minimise(features, own, 0.3)
    assert seen[0] < 1e-6


@pytest.mark.slow
def test_it_equals_em_with_logistic_regression_as_its_m_step() -> None:
    """The reference: responsibilities, then scikit-learn's regression on them, until nothing changes."""
    from sklearn.linear_model import LogisticRegression

    generator = np.random.default_rng(4)
    count = 150
    features = generator.standard_normal((count, 2))
    good = features[:, 0] > 0
    own = np.log(np.where(np.stack([good, ~good]), 0.8, 0.1))
    gate = fit_gate(features, own)
    standard = (features - gate.mean) / gate.scale
    weights = np.full((count, 2), 0.5)
    # scikit-learn sums losses: C = 1 / (N * penalty). Of two classes it has one row, for the second minus the first;
    # ours are the two rows +-w/2, whose squared norm is half of it.
    model = LogisticRegression(C=2 / (count * gate.penalty), tol=1e-10, max_iter=5000)
    for _ in range(150):
        joint = weights * np.exp(own.T)
        responsibilities = joint / joint.sum(axis=1, keepdims=True)
        model.fit(
            np.concatenate([standard, standard]),
            np.repeat([0, 1], count),
            sample_weight=responsibilities.T.ravel(),
        )
        weights = model.predict_proba(standard)
    np.testing.assert_allclose(gate(features), weights, atol=5e-3)


def test_it_learns_which_model_knows_what() -> None:
    generator = np.random.default_rng(1)
    features = generator.standard_normal((400, 3))
    good = features[:, 0] > 0
    own = np.log(np.where(np.stack([good, ~good]), 0.9, 0.2))
    gate = fit_gate(features[:300], own[:, :300])
    chosen = gate(features[300:]).argmax(axis=1)
    assert (chosen == np.where(good[300:], 0, 1)).mean() > 0.9
    pooled = -np.log(np.exp(own[:, 300:]).mean(axis=0)).mean()
    assert losses(gate, features[300:], own[:, 300:]).mean() < pooled - 0.2


def test_features_without_meaning_do_no_harm() -> None:
    generator = np.random.default_rng(6)
    own = np.log(np.array([[0.7], [0.3]]) * np.ones((2, 300)))
    gate = fit_gate(generator.standard_normal((300, 40)), own)
    held_out = losses(gate, generator.standard_normal((300, 40)), own).mean()
    assert held_out < -np.log(0.5)
    assert held_out == pytest.approx(-np.log(0.7), abs=0.06)


def test_it_is_read_as_it_was_written() -> None:
    gate = fit_gate(np.eye(4), random_logs(2, 4, 2)[:, :, 0])
    assert MixtureGate.from_json(gate.to_json()) == gate
