import numpy as np
import pytest
import torch
from torch import nn

from posttrain.attribution.influence.gradients import record_gradients
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.influence.tracin import AdamMoments, Checkpoint, less
from posttrain.store.errors import UserError


@pytest.fixture
def trained(network) -> tuple[list[Checkpoint], torch.optim.Adam]:
    """Two checkpoints of a training by torch's Adam."""
    model = network.model.module
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-6)
    result = []
    for step in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(network.x), network.y).backward()
        optimizer.step()
        if step in (2, 5):
            moments = AdamMoments.from_optimizer(network.model, optimizer)
            result.append(Checkpoint(model.state_dict(), 0.01 * (step + 1), moments))
    return result, optimizer


def gradients(model, records) -> torch.Tensor:
    return torch.cat([result for _, result in record_gradients(model, records)])


def test_the_step_is_the_one_that_torch_takes(network, trained) -> None:
    checkpoints, optimizer = trained
    model = network.model.module
    here = network.model.at(model.state_dict())
    steps = checkpoints[1].adam(gradients(here, network.train[:1]))[0]
    x, y = network.train[0]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[None]), y[None]).backward()
    before = here.flat(here.parameters)
    optimizer.step()
    after = here.flat(network.model.at(model.state_dict()).parameters)
    torch.testing.assert_close(before - after, 0.01 * steps)


@pytest.mark.parametrize("projection", [None, Projection(16, 2), Projection(16, 2, "dense")])
def test_it_is_the_sum_of_cosines_computed_one_by_one(network, trained, projection) -> None:
    checkpoints, _ = trained
    result = less(network.model, checkpoints, network.train, network.test, projection=projection)
    expected = np.zeros((20, 4))
    for item in checkpoints:
        placed = network.model.at(item.parameters)
        actual, reference = gradients(placed, network.train), gradients(placed, network.test)
        beta1, beta2, after = 0.8, 0.95, item.adam.steps + 1
        for i in range(20):
            first = (beta1 * item.adam.first + (1 - beta1) * actual[i]) / (1 - beta1**after)
            second = (beta2 * item.adam.second + (1 - beta2) * actual[i] ** 2) / (1 - beta2**after)
            step = first / (second**0.5 + 1e-6)
            for j in range(4):
                a, b = step, reference[j]
                if projection:
                    a, b = projection(a[None])[0], projection(b[None])[0]
                expected[i, j] += item.rate * float(a @ b / (a.norm() * b.norm()))
    np.testing.assert_allclose(result.scores, expected, rtol=1e-9, atol=1e-12)
    assert np.abs(result.scores).max() <= 0.09 + 1e-12
    assert result.evaluations == 48


def test_groups_are_averaged_before_the_cosine(network, trained) -> None:
    checkpoints, _ = trained
    result = less(network.model, checkpoints[:1], network.train, network.test, projection=None, groups=[1, 0, 1, 1])
    placed = network.model.at(checkpoints[0].parameters)
    steps, wanted = checkpoints[0].adam(gradients(placed, network.train)), gradients(placed, network.test)
    means = torch.stack([wanted[1], wanted[[0, 2, 3]].mean(0)])
    expected = 0.03 * torch.nn.functional.cosine_similarity(steps[:, None], means[None], dim=2)
    np.testing.assert_allclose(result.scores, expected.numpy(), rtol=1e-9)


def test_lengths_of_test_gradients_do_not_count(network, trained) -> None:
    checkpoints, _ = trained
    result = less(network.model, checkpoints, network.train, network.test, projection=None)
    doubled = network.model.__class__(
        network.model.module,
        network.model.outputs,
        lambda outputs, batch: 3 * nn.functional.cross_entropy(outputs, batch[1], reduction="none"),
    )
    plain = [Checkpoint(item.parameters, item.rate, item.adam) for item in checkpoints]
    moved = less(doubled, plain, network.train, network.test, projection=None)
    # Training steps do change with the scale, as Adam's moments stay: only their part of the scores.
    assert not np.allclose(result.scores, moved.scores)
    zero = AdamMoments(torch.zeros(43).double(), torch.zeros(43).double(), 0, epsilon=0.0)
    alone = [Checkpoint(checkpoints[0].parameters, 1.0, zero)]
    np.testing.assert_allclose(
        less(network.model, alone, network.train, network.test, projection=None).scores,
        less(doubled, alone, network.train, network.test, projection=None).scores,
    )


@pytest.mark.slow
def test_settled_moments_are_what_adam_comes_to_one_record_at_a_time(network) -> None:
    # a learning rate of 0 lets the weights stay; the fewer it forgets, the nearer its memory is to the mean
    model = network.model.module
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9999, 0.9999))
    for _ in range(200):
        for x, y in network.train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[None]), y[None]).backward()
            optimizer.step()
    explicit, result = (
        AdamMoments.from_optimizer(network.model, optimizer),
        AdamMoments.from_records(network.model, network.train, 7),
    )
    full = 1 - 0.9999**explicit.steps
    torch.testing.assert_close(result.first, explicit.first / full, rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(result.second, explicit.second / full, rtol=2e-2, atol=1e-5)


def test_mistakes_are_one_line(network, trained) -> None:
    checkpoints, _ = trained
    model, train, test = network.model, network.train, network.test
    with pytest.raises(UserError, match="there are no test records"):
        less(model, checkpoints, train, [], projection=None)
    bare = Checkpoint(checkpoints[0].parameters, 0.1)
    with pytest.raises(UserError, match="checkpoint 2 has no moments of Adam"):
        less(model, [checkpoints[0], bare], train, test, projection=None)
    with pytest.raises(UserError, match="groups must number"):
        less(model, checkpoints, train, test, projection=None, groups=[0, 2, 2, 0])
    with pytest.raises(UserError, match="groups must number"):
        less(model, checkpoints, train, test, projection=None, groups=[0, 0])
    with pytest.raises(UserError, match=r"no moments of Adam for 0\.weight"):
        AdamMoments.from_optimizer(model, torch.optim.SGD(model.module.parameters(), lr=0.1))
