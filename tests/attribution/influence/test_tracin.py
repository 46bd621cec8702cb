import numpy as np
import pytest
import torch

from posttrain.attribution.influence.influence_functions import influence_functions
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.influence.tracin import TracInCheckpoint, tracin
from posttrain.attribution.values import Values
from posttrain.store.errors import UserError


def losses_after_a_step(network, parameters: dict, record, rate: float) -> torch.Tensor:
    """The test records' losses after one step of torch's SGD on one record."""
    model = network.model.module
    model.load_state_dict(parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(record[0][None]), record[1][None]).backward()
    optimizer.step()
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(network.test_x), network.test_y, reduction="none")


def test_it_is_the_decrease_of_the_loss_over_one_small_step(network) -> None:
    parameters = {name: value.clone() for name, value in network.model.module.state_dict().items()}
    rate = 1e-6
    result = tracin(network.model, [TracInCheckpoint(parameters, rate)], network.train, network.test)
    before = network.model.losses_at(network.model.parameters, (network.test_x, network.test_y))
    decrease = torch.stack(
        [before - losses_after_a_step(network, parameters, record, rate) for record in network.train]
    ).numpy()
    np.testing.assert_allclose(result.scores, decrease, rtol=1e-3, atol=1e-12)
    assert np.abs(decrease).max() > 1e-7
    assert result.evaluations == 24


def test_checkpoints_are_summed_by_their_learning_rates(network) -> None:
    first = network.model.parameters
    second = {name: value * 0.5 for name, value in first.items()}
    single = [
        tracin(network.model, [TracInCheckpoint(parameters, 1.0)], network.train, network.test).scores
        for parameters in (first, second)
    ]
    combined = tracin(
        network.model, [TracInCheckpoint(first, 0.1), TracInCheckpoint(second, 0.3)], network.train, network.test
    )
    np.testing.assert_allclose(combined.scores, 0.1 * single[0] + 0.3 * single[1])
    assert not np.allclose(single[0], single[1])


def test_a_checkpoint_is_a_copy(network) -> None:
    checkpoint = TracInCheckpoint(network.model.module.state_dict(), 1.0)
    before = tracin(network.model, [checkpoint], network.train, network.test)
    with torch.no_grad():
        network.model.module[2].weight.add_(1)
    after = tracin(network.model, [checkpoint], network.train, network.test)
    np.testing.assert_array_equal(before.scores, after.scores)


def test_a_projection_approximates_the_scores(network) -> None:
    checkpoint = TracInCheckpoint(network.model.parameters, 1.0)
    exact = tracin(network.model, [checkpoint], network.train, network.test).scores
    projected = np.mean(
        [
            tracin(network.model, [checkpoint], network.train, network.test, projection=Projection(64, seed)).scores
            for seed in range(40)
        ],
        axis=0,
    )
    assert 0 < np.linalg.norm(projected - exact) < 0.15 * np.linalg.norm(exact)


def test_influence_with_the_identity_as_curvature_equals_tracin(network) -> None:
    """With a damping far above the curvature, (H + damping)^-1 is 1 / damping."""
    damping = 1e7
    result = influence_functions(network.model, network.train, network.test, damping=damping)
    one_step = tracin(network.model, [TracInCheckpoint(network.model.parameters, 1 / 20)], network.train, network.test)
    np.testing.assert_allclose(result.scores * damping, one_step.scores, rtol=1e-5, atol=1e-9)


def test_values_are_sums_over_the_test_records(network) -> None:
    result = tracin(network.model, [TracInCheckpoint(network.model.parameters, 1.0)], network.train, network.test)
    assert isinstance(result, Values)
    np.testing.assert_allclose(result.values, result.scores.sum(1))
    np.testing.assert_allclose(result.standard_errors, 2 * result.scores.std(1, ddof=1))
    assert result.evaluations == 24


def test_missing_checkpoints_records_and_rates_are_refused(network) -> None:
    with pytest.raises(UserError, match="there are no checkpoints"):
        tracin(network.model, [], network.train, network.test)
    with pytest.raises(UserError, match=r"learning rate of checkpoint 1 must be above 0, not 0"):
        tracin(network.model, [TracInCheckpoint(network.model.parameters, 0)], network.train, network.test)
    with pytest.raises(UserError, match="there are no training records"):
        tracin(network.model, [TracInCheckpoint(network.model.parameters, 1.0)], [], network.test)
    with pytest.raises(UserError, match="the checkpoint lacks 4 parameters"):
        tracin(network.model, [TracInCheckpoint({}, 1.0)], network.train, network.test)
