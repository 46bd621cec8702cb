import numpy as np
import pytest
import torch
from torch import nn

from posttrain.attribution.influence.gradients import record_gradients
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.influence.tracin import AdamMoments, TracInCheckpoint, less
from posttrain.store.errors import UserError


def adam_moments(model, optimizer: torch.optim.Adam) -> AdamMoments:
    """Reads the moments and settings of torch's Adam."""
    states = {name: optimizer.state[value] for name, value in model.module.named_parameters()}
    first, second = (
        model.flat({name: state[key] for name, state in states.items()}) for key in ("exp_avg", "exp_avg_sq")
    )
    group = optimizer.param_groups[0]
    steps = int(next(iter(states.values()))["step"])
    return AdamMoments(first.clone(), second.clone(), steps, *group["betas"], group["eps"])


@pytest.fixture
def adam_training(network) -> tuple[list[TracInCheckpoint], torch.optim.Adam]:
    """Two checkpoints of a training by torch's Adam."""
    model = network.model.module
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-6)
    result = []
    for step in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(network.x), network.y).backward()
        optimizer.step()
        if step in (2, 5):
            moments = adam_moments(network.model, optimizer)
            result.append(TracInCheckpoint(model.state_dict(), 0.01 * (step + 1), moments))
    return result, optimizer


def gradients(model, records) -> torch.Tensor:
    return torch.cat([result for _, result in record_gradients(model, records)])


def test_the_step_equals_that_of_torch(network, adam_training) -> None:
    checkpoints, optimizer = adam_training
    model = network.model.module
    at_checkpoint = network.model.at(model.state_dict())
    steps = checkpoints[1].adam(gradients(at_checkpoint, network.train[:1]))[0]
    x, y = network.train[0]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[None]), y[None]).backward()
    before = at_checkpoint.flat(at_checkpoint.parameters)
    optimizer.step()
    after = at_checkpoint.flat(network.model.at(model.state_dict()).parameters)
    torch.testing.assert_close(before - after, 0.01 * steps)


@pytest.mark.parametrize("projection", [None, Projection(16, 2), Projection(16, 2, "dense")])
def test_it_equals_the_sum_of_cosines_record_by_record(network, adam_training, projection) -> None:
    checkpoints, _ = adam_training
    result = less(network.model, checkpoints, network.train, network.test, projection=projection)
    expected = np.zeros((20, 4))
    for checkpoint in checkpoints:
        at_checkpoint = network.model.at(checkpoint.parameters)
        train_gradients, test_gradients = (
            gradients(at_checkpoint, network.train),
            gradients(at_checkpoint, network.test),
        )
        beta1, beta2, after = 0.8, 0.95, checkpoint.adam.steps + 1
        for i in range(20):
            first = (beta1 * checkpoint.adam.first + (1 - beta1) * train_gradients[i]) / (1 - beta1**after)
            second = (beta2 * checkpoint.adam.second + (1 - beta2) * train_gradients[i] ** 2) / (1 - beta2**after)
            step = first / (second**0.5 + 1e-6)
            for j in range(4):
                a, b = step, test_gradients[j]
                if projection:
                    a, b = projection(a[None])[0], projection(b[None])[0]
                expected[i, j] += checkpoint.rate * float(a @ b / (a.norm() * b.norm()))
    np.testing.assert_allclose(result.scores, expected, rtol=1e-9, atol=1e-12)
    assert np.abs(result.scores).max() <= 0.09 + 1e-12
    assert result.evaluations == 48


def test_groups_are_averaged_before_the_cosine(network, adam_training) -> None:
    checkpoints, _ = adam_training
    result = less(network.model, checkpoints[:1], network.train, network.test, projection=None, groups=[1, 0, 1, 1])
    at_checkpoint = network.model.at(checkpoints[0].parameters)
    steps, test_gradients = (
        checkpoints[0].adam(gradients(at_checkpoint, network.train)),
        gradients(at_checkpoint, network.test),
    )
    means = torch.stack([test_gradients[1], test_gradients[[0, 2, 3]].mean(0)])
    expected = 0.03 * torch.nn.functional.cosine_similarity(steps[:, None], means[None], dim=2)
    np.testing.assert_allclose(result.scores, expected.numpy(), rtol=1e-9)


def test_the_length_of_test_gradients_does_not_matter(network, adam_training) -> None:
    checkpoints, _ = adam_training
    result = less(network.model, checkpoints, network.train, network.test, projection=None)
    scaled = network.model.__class__(
        network.model.module,
        network.model.outputs,
        lambda outputs, batch: 3 * nn.functional.cross_entropy(outputs, batch[1], reduction="none"),
    )
    copies = [TracInCheckpoint(item.parameters, item.rate, item.adam) for item in checkpoints]
    scaled_result = less(scaled, copies, network.train, network.test, projection=None)
    # The training steps do change with the scale, as Adam's moments stay the same.
    assert not np.allclose(result.scores, scaled_result.scores)
    zero = AdamMoments(torch.zeros(43).double(), torch.zeros(43).double(), 0, epsilon=0.0)
    single = [TracInCheckpoint(checkpoints[0].parameters, 1.0, zero)]
    np.testing.assert_allclose(
        less(network.model, single, network.train, network.test, projection=None).scores,
        less(scaled, single, network.train, network.test, projection=None).scores,
    )


@pytest.mark.slow
def test_moments_from_records_equal_the_limit_of_adam(network) -> None:
    # With a learning rate of 0 the weights stay; with betas near 1 the moments approach the mean over the records.
    model = network.model.module
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9999, 0.9999))
    for _ in range(200):
        for x, y in network.train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[None]), y[None]).backward()
            optimizer.step()
    expected, result = (
        adam_moments(network.model, optimizer),
        AdamMoments.from_records(network.model, network.train, 7),
    )
    bias_correction = 1 - 0.9999**expected.steps
    torch.testing.assert_close(result.first, expected.first / bias_correction, rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(result.second, expected.second / bias_correction, rtol=2e-2, atol=1e-5)


def test_missing_records_moments_and_groups_are_refused(network, adam_training) -> None:
    checkpoints, _ = adam_training
    model, train, test = network.model, network.train, network.test
    with pytest.raises(UserError, match="there are no test records"):
        less(model, checkpoints, train, [], projection=None)
    bare = TracInCheckpoint(checkpoints[0].parameters, 0.1)
    with pytest.raises(UserError, match="checkpoint 2 has no moments of Adam"):
        less(model, [checkpoints[0], bare], train, test, projection=None)
    with pytest.raises(UserError, match="groups must number"):
        less(model, checkpoints, train, test, projection=None, groups=[0, 2, 2, 0])
    with pytest.raises(UserError, match="groups must number"):
        less(model, checkpoints, train, test, projection=None, groups=[0, 0])
