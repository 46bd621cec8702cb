"""The contract of every objective, whatever its formula."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.store.section import Section
from posttrain.train.objectives import config as settings
from posttrain.train.objectives.build import objective_class
from posttrain.train.objectives.distillation import distill_hidden, top_tokens
from posttrain.train.objectives.loss import Loss, SequenceLogProbs, merge_metrics
from posttrain.train.objectives.registry import OBJECTIVES

Rows = Mapping[str, Tensor]
Make = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """One setting of an objective, its call on rows, and the names of the inputs that get gradients."""

    name: str
    config: Section
    call: Callable[[Callable[..., Loss], Rows, Section], Loss]
    inputs: tuple[str, ...]

    def loss(self, rows: Rows) -> Loss:
        return self.call(objective_class(self.name).formula, rows, self.config)


def sequences(rows: Rows, name: str) -> SequenceLogProbs:
    return SequenceLogProbs(rows[name], rows[f"{name}_counts"])


def with_reference(f: Callable[..., Loss], rows: Rows, config: Section) -> Loss:
    return f(*(sequences(rows, n) for n in ("chosen", "rejected", "reference_chosen", "reference_rejected")), config)


def reference_free(f: Callable[..., Loss], rows: Rows, config: Section) -> Loss:
    return f(sequences(rows, "chosen"), sequences(rows, "rejected"), config, tokens_per_pair=4.0)


def orpo_with_prompts(f: Callable[..., Loss], rows: Rows, config: Section) -> Loss:
    texts = SequenceLogProbs(rows["chosen"] * 1.5, rows["chosen_counts"] + 3)
    chosen, rejected = sequences(rows, "chosen"), sequences(rows, "rejected")
    return f(chosen, rejected, config, likelihood=texts, tokens_per_pair=6.5)


def labelled(f: Callable[..., Loss], rows: Rows, config: Section) -> Loss:
    kl = rows["chosen"].new_tensor(0.7)
    return f(sequences(rows, "chosen"), sequences(rows, "reference_chosen"), rows["desirable"], kl, config)


def rewards(f: Callable[..., Loss], rows: Rows, config: Section) -> Loss:
    return f(rows["chosen"], rows["rejected"], config, margin=rows["margin"])


def classes(f: Callable[..., Loss], rows: Rows, config: Section) -> Loss:
    return f(rows["student"], rows["targets"], config)


def teacher(f: Callable[..., Loss], rows: Rows, config: Section) -> Loss:
    return f(rows["student"], rows["teacher"], config, targets=rows["targets"])


def truncated_teacher(f: Callable[..., Loss], rows: Rows, config: Section) -> Loss:
    return f(rows["student"], top_tokens(rows["teacher"], 3), config)


def hidden(f: Callable[..., Loss], rows: Rows, config: Section) -> Loss:
    widths = rows["hidden"].shape[1], rows["teacher_hidden"].shape[1]
    matrix = torch.linspace(-1, 1, widths[0] * widths[1]).reshape(widths).to(rows["hidden"])
    return distill_hidden(rows["hidden"], rows["teacher_hidden"], config, projection=lambda states: states @ matrix)


PAIR = ("chosen", "rejected")
CASES = [
    Case("sft", settings.SftConfig(), lambda f, rows, config: f(sequences(rows, "chosen"), config), ("chosen",)),
    *(
        Case(name, config, with_reference, PAIR)
        for name, config in (
            ("dpo", settings.DpoConfig()),
            ("dpo", settings.DpoConfig(beta=0.5, label_smoothing=0.3)),
            ("robust_dpo", settings.RobustDpoConfig()),
            ("ipo", settings.IpoConfig()),
            ("hinge", settings.HingeConfig()),
        )
    ),
    Case("orpo", settings.OrpoConfig(), orpo_with_prompts, PAIR),
    Case("orpo", settings.OrpoConfig(likelihood="completion"), reference_free, PAIR),
    Case("simpo", settings.SimpoConfig(), reference_free, PAIR),
    Case("simpo", settings.SimpoConfig(beta=2, nll_weight=0.5, label_smoothing=0.1), reference_free, PAIR),
    Case("cpo", settings.CpoConfig(), reference_free, PAIR),
    Case("kto", settings.KtoConfig(desirable_weight=1.5, undesirable_weight=0.7), labelled, ("chosen",)),
    Case("reward", settings.RewardConfig(centring=0.01), rewards, PAIR),
    Case("classification", settings.ClassificationConfig(label_smoothing=0.1), classes, ("student",)),
    *(
        Case("distill", settings.DistillationConfig(**options), teacher, ("student",))
        for options in (
            {"divergence": "forward"},
            {"divergence": "reverse", "temperature": 2.0},
            {"beta": 0.2, "hard_weight": 0.4},
            {"divergence": "reverse", "top_k": 3},
        )
    ),
    Case("distill", settings.DistillationConfig(), truncated_teacher, ("student",)),
    Case("distill", settings.DistillationConfig(divergence="none"), hidden, ("hidden",)),
    Case("distill", settings.DistillationConfig(divergence="none", distance="cosine"), hidden, ("hidden",)),
]
few_examples = example_settings(max_examples=15)  # of each of two dozen cases
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def select_rows(rows: Rows, selection: slice | Tensor) -> dict[str, Tensor]:
    return {name: value[selection] for name, value in rows.items()}


def test_every_objective_has_a_case() -> None:
    assert {case.name for case in CASES} == set(OBJECTIVES)
    assert all(type(case.config) is OBJECTIVES[case.name].config for case in CASES)


@every_case
@few_examples
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 7), position=st.floats(0, 1))
@pytest.mark.slow
def test_parts_of_a_batch_add_up(case: Case, make_rows: Make, seed: int, n: int, position: float) -> None:
    rows, middle = make_rows(seed, n), min(n - 1, 1 + int(position * (n - 1)))
    total = case.loss(rows)
    parts = [case.loss(select_rows(rows, slice(0, middle))), case.loss(select_rows(rows, slice(middle, None)))]
    assert sum(entry.sum.item() for entry in parts) == pytest.approx(total.sum.item(), rel=1e-9, abs=1e-12)
    assert sum(entry.count for entry in parts) == pytest.approx(total.count)
    merged = merge_metrics(entry.metrics for entry in parts)
    assert merged.keys() == total.metrics.keys()
    for name, (value, count) in total.metrics.items():
        assert merged[name][0].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12), name
        assert merged[name][1] == pytest.approx(count), name


@every_case
@few_examples
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_the_order_of_rows_does_not_matter(case: Case, make_rows: Make, seed: int) -> None:
    rows = make_rows(seed, 5)
    shuffled_rows = select_rows(rows, torch.from_numpy(np.random.default_rng(seed).permutation(5)))
    assert case.loss(shuffled_rows).sum.item() == pytest.approx(case.loss(rows).sum.item(), rel=1e-9, abs=1e-12)


@every_case
@pytest.mark.parametrize("seed", range(2))
def test_gradients_match_finite_differences(case: Case, make_rows: Make, seed: int) -> None:
    rows = make_rows(seed, 3)

    def total(*inputs: Tensor) -> Tensor:
        return case.loss({**rows, **dict(zip(case.inputs, inputs, strict=True))}).sum

    assert torch.autograd.gradcheck(total, [rows[name].requires_grad_() for name in case.inputs])


@every_case
def test_only_the_policy_gets_gradients(case: Case, make_rows: Make) -> None:
    rows = make_rows(1, 6)
    constants = [name for name in rows if name.startswith(("reference", "teacher")) and not name.endswith("counts")]
    for name in (*case.inputs, *constants):
        rows[name].requires_grad_()
    loss = case.loss(rows)
    loss.sum.backward()
    for name in case.inputs:
        assert rows[name].grad is not None
        assert rows[name].grad.abs().sum() > 0, name
    assert all(rows[name].grad is None for name in constants)
    assert all(value.ndim == 0 and not value.requires_grad for value, _ in loss.metrics.values())


@every_case
def test_float32_is_near_float64(case: Case, make_rows: Make) -> None:
    float32_loss, float64_loss = case.loss(make_rows(3, 6, torch.float32)), case.loss(make_rows(3, 6))
    assert float32_loss.sum.dtype == torch.float32
    assert float32_loss.sum.item() == pytest.approx(float64_loss.sum.item(), rel=1e-5, abs=1e-5)


@every_case
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e3])
def test_extreme_inputs_stay_finite(case: Case, make_rows: Make, scale: float) -> None:
    rows = make_rows(4, 6, torch.float32, scale)
    for name in case.inputs:
        rows[name].requires_grad_()
    loss = case.loss(rows)
    loss.sum.backward()
    assert math.isfinite(loss.sum.item())
    assert all(math.isfinite(value.item()) for value, _ in loss.metrics.values())
    for name in case.inputs:
        assert rows[name].grad is not None
        assert rows[name].grad.isfinite().all(), name


WEIGHTED = [case for case in CASES if OBJECTIVES[case.name].shape not in ("labelled", "teacher")]
every_weighted_case = pytest.mark.parametrize("case", WEIGHTED, ids=lambda case: case.name)


def weighted_loss(case: Case, rows: Rows, weights: list[float]) -> Loss:
    dtype = rows["chosen"].dtype
    function = partial(objective_class(case.name).formula, row_weights=torch.tensor(weights, dtype=dtype))
    return case.call(function, rows, case.config)


@every_weighted_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@few_examples
@given(seed=st.integers(0, 2**32 - 1), repeats=st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any))
@pytest.mark.slow
def test_a_row_weight_equals_repetitions_of_the_row(
    case: Case, make_rows: Make, dtype: torch.dtype, tolerance: float, seed: int, repeats: list[int]
) -> None:
    rows = make_rows(seed, 4, dtype)
    repeated = case.loss(select_rows(rows, torch.arange(4).repeat_interleave(torch.tensor(repeats))))
    result = weighted_loss(case, rows, [float(entry) for entry in repeats])
    assert result.sum.item() == pytest.approx(repeated.sum.item(), rel=tolerance, abs=tolerance * 10)
    assert result.count == pytest.approx(repeated.count, rel=tolerance)
    unweighted = weighted_loss(case, rows, [1.0] * 4)
    assert (unweighted.sum.item(), unweighted.count) == (case.loss(rows).sum.item(), case.loss(rows).count)


@every_weighted_case
def test_each_row_has_one_weight(case: Case, make_rows: Make) -> None:
    with pytest.raises(ValueError, match="do not go with"):
        weighted_loss(case, make_rows(1, 4), [2.0])


@pytest.mark.parametrize("name", ["orpo", "simpo", "cpo"])
def test_a_likelihood_is_a_weighted_mean_over_tokens(name: str, make_rows: Make) -> None:
    """Without ``tokens_per_pair``, the tokens of the rows are counted by their weights."""
    config = {"orpo": settings.OrpoConfig(), "simpo": settings.SimpoConfig(nll_weight=0.5)}.get(
        name, settings.CpoConfig()
    )

    def loss(rows: Rows, **weights: Tensor) -> Loss:
        return objective_class(name).formula(sequences(rows, "chosen"), sequences(rows, "rejected"), config, **weights)

    rows = make_rows(2, 3)
    repeated = loss(select_rows(rows, torch.tensor([0, 0, 2])))
    result = loss(rows, row_weights=torch.tensor([0.2, 0.0, 0.1], dtype=torch.float64))
    assert result.sum.item() / result.count == pytest.approx(repeated.sum.item() / repeated.count, rel=1e-12)
