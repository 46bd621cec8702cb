import pytest
import torch

from posttrain.train.objectives.loss import Loss, SequenceLogProbs, log_ratios, mean_metrics, merge_metrics, to_float32


def metric(total: float, count: float) -> tuple[torch.Tensor, float]:
    return torch.tensor(total), count


def test_metrics_of_two_losses_are_added() -> None:
    merged = merge_metrics([{"a": metric(3, 2), "b": metric(1, 1)}, {"a": metric(5, 6), "c": metric(7, 1)}])
    assert {name: (value.item(), count) for name, (value, count) in merged.items()} == {
        "a": (8, 8),
        "b": (1, 1),
        "c": (7, 1),
    }
    assert mean_metrics(merged) == {"a": 1, "b": 1, "c": 7}


def test_a_metric_without_a_count_has_no_mean() -> None:
    assert mean_metrics({"a": metric(0, 0), "b": metric(4, 2)}) == {"b": 2}


def test_the_margin_is_the_difference_of_means() -> None:
    rewards = {"rewards/chosen": metric(6, 2), "rewards/rejected": metric(3, 3)}
    assert mean_metrics(rewards)["rewards/margins"] == 2
    assert "rewards/margins" not in mean_metrics({**rewards, "rewards/rejected": metric(0, 0)})
    assert mean_metrics({**rewards, "rewards/margins": metric(5, 1)})["rewards/margins"] == 5


def test_plus_adds_a_weighted_loss() -> None:
    first = Loss(torch.tensor(3.0), 2, {"a": metric(1, 2)})
    total = first.plus(Loss(torch.tensor(10.0), 2, {"b": metric(2, 2)}), 0.5)
    assert (total.sum.item(), total.count, total.metrics.keys()) == (8, 2, {"a", "b"})
    with pytest.raises(ValueError, match="2 and 3"):
        first.plus(Loss(torch.tensor(1.0), 3))


def test_only_half_precision_is_widened() -> None:
    assert to_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert to_float32(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_sequences_are_indexed_and_joined() -> None:
    sequences = SequenceLogProbs(torch.tensor([-4.0, 0.0, -3.0]), torch.tensor([2, 0, 3]))
    assert sequences.means.tolist() == [-2, 0, -1]
    assert sequences[1:].sums.tolist() == [0, -3]
    assert sequences[torch.tensor([2, 0])].counts.tolist() == [3, 2]
    rejoined = SequenceLogProbs.join([sequences[:1], sequences[1:]])
    assert (rejoined.sums.tolist(), rejoined.counts.tolist()) == (sequences.sums.tolist(), sequences.counts.tolist())
    assert len(rejoined) == 3


@pytest.mark.parametrize(("sums", "counts"), [((2,), (3,)), ((1, 2), (1, 2)), ((), ())])
def test_sequences_must_be_vectors(sums: tuple[int, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="vectors"):
        SequenceLogProbs(torch.zeros(sums), torch.zeros(counts, dtype=torch.long))


def test_a_single_reference_is_not_broadcast() -> None:
    policy, reference = (
        SequenceLogProbs(torch.zeros(3), torch.ones(3).long()),
        SequenceLogProbs(torch.zeros(1), torch.ones(1).long()),
    )
    with pytest.raises(ValueError, match="3 sequences do not go with 1"):
        log_ratios(policy, reference)
