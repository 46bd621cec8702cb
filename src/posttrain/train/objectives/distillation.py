"""Distillation: a student learns a teacher's next-token distributions, or its hidden states.

All take rows that the caller chose (positions that predict a supervised token), so that a chunk of them is a call,
and chunks' sums add.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.store.errors import UserError
from posttrain.train.objectives.config import DistillationConfig, HiddenConfig
from posttrain.train.objectives.loss import Loss, to_float32

_LOG_ZERO = -1e4
"""The log-probability of what cannot happen: finite, so that 0 ln 0 is 0."""


@dataclass(frozen=True, eq=False)
class TopTokens:
    """What is kept of a teacher: its k most probable next tokens at N positions.

    Args:
        ids: int64 [N, k].
        log_probabilities: float32 [N, k] under the whole vocabulary, at the objective's temperature, nats.
    """

    ids: Tensor
    log_probabilities: Tensor

    def __getitem__(self, rows: slice) -> "TopTokens":
        return TopTokens(self.ids[rows], self.log_probabilities[rows])


def top_tokens(logits: Tensor, k: int, temperature: float = 1.0) -> TopTokens:
    """The teacher's k most probable tokens from its logits [N, V], most probable first."""
    best = (to_float32(logits.detach()) / temperature).log_softmax(-1).topk(min(k, logits.shape[-1]), dim=-1)
    return TopTokens(best.indices, best.values)


def distill(
    student: Tensor, teacher: Tensor | TopTokens, config: DistillationConfig, *, targets: Tensor | None = None
) -> Loss:
    """(1-w) D(teacher, student) + w cross-entropy of the targets; a mean over positions.

    D is the forward KL(teacher | student) of G. Hinton, O. Vinyals, J. Dean, Distilling the Knowledge in a Neural
    Network, 2015, arXiv:1503.02531, section 2; the reverse KL(student | teacher) of Y. Gu et al., MiniLLM, 2023,
    arXiv:2306.08543; or the generalised Jensen-Shannon divergence of R. Agarwal et al., On-Policy Distillation of
    Language Models (GKD), 2023, arXiv:2306.13649, equation 1: b KL(teacher | m) + (1-b) KL(student | m) with
    m = b teacher + (1-b) student. TRL's GKDTrainer has the same with beta 0 for forward and 1 for reverse. Both
    distributions are taken at ``temperature``, the cross-entropy at 1.

    Of a teacher cut to ``top_k`` all tokens but its k best are one event for both: a lower bound of the divergence
    that is 0 where the two agree on those k, and finite in either direction.

    Args:
        student: [N, V], logits.
        teacher: [N, V], logits, or the tokens that were kept of them; no gradient goes there.
        targets: int64 [N], the tokens that follow, where ``hard_weight`` is not 0.

    Raises:
        UserError: the teacher has another vocabulary.
        ValueError: there are no targets to learn.
    """
    student = to_float32(student)
    log_student = (student / config.temperature).log_softmax(-1)
    if isinstance(teacher, Tensor):
        _check_vocabulary(student, teacher)
        if config.top_k is not None:
            teacher = top_tokens(teacher, config.top_k, config.temperature)
    if isinstance(teacher, Tensor):
        best = teacher.argmax(-1)
        log_teacher = (to_float32(teacher.detach()) / config.temperature).log_softmax(-1)
    else:
        best = teacher.ids.gather(-1, teacher.log_probabilities.argmax(-1, keepdim=True)).squeeze(-1)
        log_student, log_teacher = _merge_rest(log_student, teacher)
    soft = divergence(log_student, log_teacher, config)
    agreed = (student.detach().argmax(-1) == best).to(soft.dtype)
    values = {"divergence": soft.detach(), "agreement": agreed}
    losses = soft * config.temperature**2 if config.scale_by_temperature else soft
    if config.hard_weight:
        if targets is None:
            raise ValueError("hard_weight needs targets")
        hard = functional.cross_entropy(student, targets, reduction="none")
        values["nll"] = hard.detach()
        losses = (1 - config.hard_weight) * losses + config.hard_weight * hard
    count = float(len(losses))
    return Loss(losses.sum(), count, {name: (value.sum(), count) for name, value in values.items()})


def divergence(student: Tensor, teacher: Tensor, config: DistillationConfig) -> Tensor:
    """[N], nats, between log-probabilities [N, C] over the same C events; see ``distill``."""
    student, teacher = student.clamp(min=_LOG_ZERO), teacher.clamp(min=_LOG_ZERO)
    if config.divergence == "forward":
        return _kl(teacher, student)
    if config.divergence == "reverse":
        return _kl(student, teacher)
    mixture = torch.logaddexp(student + math.log1p(-config.beta), teacher + math.log(config.beta))
    return config.beta * _kl(teacher, mixture) + (1 - config.beta) * _kl(student, mixture)


def distill_hidden(
    student: Tensor, teacher: Tensor, config: HiddenConfig, *, projection: Callable[[Tensor], Tensor] | None = None
) -> Loss:
    """How far the student's hidden states are from the teacher's; a mean over positions.

    ``mse``: the mean square over dimensions, after A. Romero et al., FitNets, 2014, arXiv:1412.6550, equation 3,
    and X. Jiao et al., TinyBERT, 2019, arXiv:1909.10351, equation 8. ``cosine``: 1 less the cosine, as V. Sanh et
    al., DistilBERT, 2019, arXiv:1910.01108. Call it once a pair of layers; ``Loss.plus`` adds them.

    Args:
        student: [N, D].
        teacher: [N, E]; no gradient goes there.
        projection: from D to E dimensions, learned with the student and thrown away after.

    Raises:
        UserError: the widths differ and there is no projection.
    """
    if projection is not None:
        student = projection(student)
    student, teacher = to_float32(student), to_float32(teacher.detach())
    if student.shape[-1] != teacher.shape[-1]:
        sizes = f"{student.shape[-1]} and {teacher.shape[-1]}"
        raise UserError(f"hidden states of {sizes} dimensions do not compare", fix="learn a projection between them")
    if config.distance == "mse":
        losses = (student - teacher).square().mean(-1)
    else:
        losses = 1 - functional.cosine_similarity(student, teacher, dim=-1)
    count = float(len(losses))
    return Loss(losses.sum(), count, {"hidden": (losses.detach().sum(), count)})


def _check_vocabulary(student: Tensor, teacher: Tensor) -> None:
    if student.shape[-1] != teacher.shape[-1]:
        sizes = f"{teacher.shape[-1]} tokens, the student's {student.shape[-1]}"
        raise UserError(f"the teacher's vocabulary has {sizes}", fix="take a teacher with the student's tokenizer")


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(-1)


def _merge_rest(student: Tensor, teacher: TopTokens) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, k + 1] of both for the teacher's tokens and for any other."""
    known = student.gather(-1, teacher.ids)
    rest = student.scatter(-1, teacher.ids, _LOG_ZERO).logsumexp(-1, keepdim=True)
    log_teacher = to_float32(teacher.log_probabilities.detach())
    mass = log_teacher.logsumexp(-1, keepdim=True)
    smallest = torch.finfo(mass.dtype).eps
    # A rest too small to be told from rounding is at most that, and what the student says of it below.
    unknown = rest.detach().clamp(max=math.log(smallest)).to(mass.dtype)
    left = torch.where(mass < -smallest, torch.log(-torch.expm1(mass)), unknown)
    return torch.cat([known, rest], -1), torch.cat([log_teacher, left], -1)
