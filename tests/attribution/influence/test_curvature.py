import pytest
import torch

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.losses import IGNORE_INDEX, CrossEntropy
from posttrain.store.errors import UserError


def gauss_newton_by_hand(fitted) -> torch.Tensor:
    """The mean of J' (diag(p) - p p') J."""
    model = fitted.model
    total = torch.zeros(model.size, model.size, dtype=torch.float64)
    for x, y in fitted.train:

        def logits(flat: torch.Tensor, x=x, y=y) -> torch.Tensor:
            return model.outputs_at(model.unflat(flat), (x[None], y[None]))[0]

        parameters = model.flat(model.parameters)
        jacobian, p = torch.func.jacrev(logits)(parameters), logits(parameters).softmax(0)
        total += jacobian.T @ (p.diag() - p[:, None] * p) @ jacobian
    return total / len(fitted.x)


@pytest.mark.parametrize("block_size", [1, 6, None])
def test_products_equal_the_formula(network, block_size) -> None:
    size = network.model.size
    curvature = Curvature(network.model, network.train, block_size)
    product = curvature.product(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(product, gauss_newton_by_hand(network))
    assert curvature.evaluations == 20 * size
    assert float(torch.linalg.eigvalsh(product).min()) > -1e-12


def test_exact_roots_sum_to_the_hessian_of_the_outputs() -> None:
    outputs = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batch = (outputs, torch.tensor([0, 2, 1, 1]))
    roots = CrossEntropy().roots(outputs, batch, None, None)
    p = outputs.softmax(1)
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    torch.testing.assert_close(torch.einsum("rbi,rbj->bij", roots, roots), expected)


def test_sampled_roots_sum_to_it_within_their_standard_error() -> None:
    outputs = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    targets = torch.tensor([[0, 1, IGNORE_INDEX], [3, 3, 2]])
    samples = 40_000
    roots = CrossEntropy().roots(outputs, (targets,), samples, torch.Generator().manual_seed(3))
    assert roots.shape == (samples, 2, 3, 4)
    assert not roots[:, 0, 2].any()
    flat = roots.flatten(2)
    result = torch.einsum("rbi,rbj->bij", flat, flat)
    squares = torch.einsum("rbi,rbj->bij", flat**2, flat**2) * samples**2 / samples
    errors = ((squares - result**2).clamp(min=0) / samples).sqrt()
    p = outputs.softmax(-1)
    for record in range(2):
        blocks = [p[record, t].diag() - p[record, t][:, None] * p[record, t] for t in range(3)]
        if record == 0:
            blocks[2] = torch.zeros(4, 4, dtype=torch.float64)
        deviation = (result[record] - torch.block_diag(*blocks)).abs()
        assert bool((deviation <= 4.5 * errors[record] + 1e-12).all())


def test_empty_records_are_refused(network) -> None:
    with pytest.raises(UserError, match="no records"):
        Curvature(network.model, [])
