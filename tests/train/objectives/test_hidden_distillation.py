import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from posttrain.store.errors import UserError
from posttrain.train.objectives.config import DistillationConfig
from posttrain.train.objectives.distillation import distill, distill_hidden

Array = np.ndarray
hidden_pairs = st.tuples(st.integers(1, 4), st.integers(2, 6)).flatmap(
    lambda shape: arrays(np.float64, (2, *shape), elements=st.floats(-4, 4).filter(lambda x: abs(x) > 0.1))
)


@pytest.mark.slow
@given(hidden_pairs)
def test_hidden_losses_match_their_definition(states: Array) -> None:
    from scipy.spatial.distance import cosine

    student, teacher = map(torch.from_numpy, states)
    mse = distill_hidden(student, teacher, DistillationConfig())
    assert mse.sum.item() == pytest.approx(((states[0] - states[1]) ** 2).mean(1).sum(), rel=1e-9)
    assert mse.count == len(student)
    cosine_loss = distill_hidden(student, teacher, DistillationConfig(distance="cosine"))
    assert cosine_loss.sum.item() == pytest.approx(sum(cosine(*row) for row in zip(*states, strict=True)), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("distance", ["mse", "cosine"])
@given(hidden_pairs)
def test_equal_hidden_states_have_no_loss_and_no_gradient(distance: str, states: Array) -> None:
    student = torch.from_numpy(states[0].copy()).requires_grad_()
    result = distill_hidden(student, torch.from_numpy(states[0]), DistillationConfig(distance=distance))
    result.sum.backward()
    assert result.sum.item() == pytest.approx(0, abs=1e-9)
    assert student.grad is not None
    assert student.grad.abs().max().item() == pytest.approx(0, abs=1e-9)


def test_a_projection_between_widths_is_learned() -> None:
    torch.manual_seed(0)
    projection = torch.nn.Linear(3, 5, bias=False)
    student, teacher = torch.randn(2, 3), torch.randn(2, 5)
    actual = distill_hidden(student, teacher, DistillationConfig(), projection=projection)
    expected = (student.numpy() @ projection.weight.detach().numpy().T - teacher.numpy()) ** 2
    assert actual.sum.item() == pytest.approx(expected.mean(1).sum(), rel=1e-5)
    actual.sum.backward()
    assert projection.weight.grad is not None
    with pytest.raises(UserError, match="3 and 5 dimensions"):
        distill_hidden(student, teacher, DistillationConfig())


def test_logit_and_hidden_losses_combine() -> None:
    logits, states = torch.zeros(2, 3), torch.ones(2, 4)
    logit_loss = distill(logits, logits + torch.tensor([1.0, 0, 0]), DistillationConfig())
    combined = logit_loss.plus(distill_hidden(states, 3 * states, DistillationConfig()), 0.25)
    assert combined.sum.item() == pytest.approx(logit_loss.sum.item() + 0.25 * 2 * 4)
    assert combined.metrics.keys() == {"divergence", "agreement", "hidden"}
