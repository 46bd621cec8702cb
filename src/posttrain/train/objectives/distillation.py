"""Distillation: a student learns a teacher's next-token distributions, or its hidden states.

All take rows that the caller chose (positions that predict a supervised token), so that a chunk of them is a call,
and chunks' sums add.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from posttrain.models.head import map_logits, predicting_states, predicting_states_of_layers
from posttrain.models.language_model import LanguageModel
from posttrain.models.loading import load_config, load_tokenizer
from posttrain.models.packing import Packed, Unit
from posttrain.store.errors import UserError
from posttrain.train.objectives.base import ObjectiveInputs, TrainArguments
from posttrain.train.objectives.config import TEACHER_KEY, DistillationConfig
from posttrain.train.objectives.loss import Loss, join_losses, to_float32
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.objectives.teacher import (
    TeacherOutputs,
    TeacherSpec,
    TopTokens,
    compute_teacher_outputs,
    load_head,
    top_tokens,
)

_LOG_ZERO = -1e4
"""The log-probability of an impossible event: finite, so that 0 ln 0 is 0 and not NaN."""

_PROJECTION_MODULE = "distillation_projections"


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
            # Cut as cached outputs are, so that both give one loss.
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
    losses = soft
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
    # An event that is impossible under both would give -inf - -inf, which is NaN.
    student, teacher = student.clamp(min=_LOG_ZERO), teacher.clamp(min=_LOG_ZERO)
    # Forward, the student covers all that the teacher may say; reverse, it keeps to what the teacher finds likely.
    if config.divergence == "forward":
        return _kl(teacher, student)
    if config.divergence == "reverse":
        return _kl(student, teacher)
    # ln(b teacher + (1-b) student) of GKD's equation 1, in logarithms: small probabilities would underflow.
    mixture = torch.logaddexp(student + math.log1p(-config.beta), teacher + math.log(config.beta))
    # Equation 1 of GKD.
    return config.beta * _kl(teacher, mixture) + (1 - config.beta) * _kl(student, mixture)


def distill_hidden(
    student: Tensor,
    teacher: Tensor,
    config: DistillationConfig,
    *,
    projection: Callable[[Tensor], Tensor] | None = None,
) -> Loss:
    """Distance of the student's hidden states from the teacher's; a mean over positions.

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
    # Squares and norms over thousands of dimensions: a sum in bfloat16 has three digits at best.
    student, teacher = to_float32(student), to_float32(teacher.detach())
    if student.shape[-1] != teacher.shape[-1]:
        sizes = f"{student.shape[-1]} and {teacher.shape[-1]}"
        raise UserError(f"hidden states of {sizes} dimensions do not compare", fix="learn a projection between them")
    if config.distance == "mse":
        # The mean over dimensions, so that the weight means the same for narrow and wide models.
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
    # exp(-1e4) is exactly 0, so that an impossible event adds 0.
    return (first.exp() * (first - second)).sum(-1)


def _merge_rest(student: Tensor, teacher: TopTokens) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, k + 1] of both for the teacher's tokens and for any other."""
    top = student.gather(-1, teacher.ids)
    # Finite, not -inf: where the teacher's tokens are all there are, the gradient of logsumexp would be NaN.
    rest = student.scatter(-1, teacher.ids, _LOG_ZERO).logsumexp(-1, keepdim=True)
    log_teacher = to_float32(teacher.log_probabilities.detach())
    mass = log_teacher.logsumexp(-1, keepdim=True)
    smallest = torch.finfo(mass.dtype).eps
    # 1 - mass of a teacher that is sure of its k tokens is rounding error: bound the rest by the smallest number that
    # is not, and by the student's own rest, so that two models that agree have divergence 0.
    unknown = rest.detach().clamp(max=math.log(smallest)).to(mass.dtype)
    teacher_rest = torch.where(mass < -smallest, torch.log(-torch.expm1(mass)), unknown)
    return torch.cat([top, rest], -1), torch.cat([log_teacher, teacher_rest], -1)


class DistillationObjective(SftObjective):
    """``distill``: the teacher's next-token distributions, its hidden states, or both.

    Like supervised fine-tuning it counts every supervised token.

    Args:
        units: one sequence each.
        lm: the student, to inspect tokenizer and sizes; it is not kept.

    Raises:
        UserError: there is no teacher, it has another tokenizer, or a named layer does not exist.
    """

    formula = staticmethod(distill)
    has_teacher = True

    def __init__(self, units: Sequence[Unit], config: TrainArguments, lm: LanguageModel) -> None:
        super().__init__(units, config)
        settings: DistillationConfig = self.settings
        self.teacher = settings.teacher_folder(Path())
        teacher = _teacher_config(self.teacher, lm.tokenizer)
        student = lm.model.config.get_text_config()
        has_logits = settings.divergence != "none"
        self.layers = settings.layers if settings.hidden_weight or not has_logits else []
        self._task = lm.task
        for student_layer, teacher_layer in self.layers:
            _check_layer(student_layer, student.num_hidden_layers, "student")
            _check_layer(teacher_layer, teacher.num_hidden_layers, "teacher")
        self._widths = student.hidden_size, teacher.hidden_size
        self.spec = TeacherSpec(
            logits=has_logits,
            top_k=settings.top_k if has_logits else None,
            temperature=settings.temperature,
            vocabulary=student.vocab_size,
            layers=[teacher_layer for _, teacher_layer in self.layers],
            dtype=config.dtype,
        )

    @classmethod
    def from_inputs(cls, inputs: ObjectiveInputs) -> Self:
        return cls(inputs.units, inputs.config, inputs.lm)

    def cache_teacher_outputs(self, folder: Path) -> None:
        self._compute_teacher_outputs(folder)

    @contextmanager
    def attach_modules(self, lm: LanguageModel) -> Iterator[None]:
        """Attaches a projection for each pair of layers if the teacher's states have another width."""
        student_width, teacher_width = self._widths
        if not self.layers or student_width == teacher_width:
            yield
            return
        like = next(lm.model.parameters())
        # Part of the model while it trains, so that optimiser and checkpoints hold it like any weight.
        projections = nn.ModuleList(nn.Linear(student_width, teacher_width, bias=False) for _ in self.layers)
        lm.model.add_module(_PROJECTION_MODULE, projections.to(like.device, like.dtype))
        try:
            yield
        finally:
            # A saved model must not have weights that its architecture does not know.
            delattr(lm.model, _PROJECTION_MODULE)

    def prepare(self, lm: LanguageModel, folder: Path, *, padded: bool, groups: Iterable[Sequence[int]] = ()) -> None:
        """Opens the teacher's outputs; computes them first if ``cache_teacher_outputs`` was not called."""
        outputs = self._compute_teacher_outputs(folder)
        self.teacher_outputs = TeacherOutputs(outputs, self.units, self.spec, lm.device)
        if self.spec.logits and self.spec.top_k is None:
            # All of a distribution is kept as the last hidden state, from which the head computes chunks of logits.
            self.head = load_head(outputs, self.teacher, lm)

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        if not self.layers:
            return self._logits_loss(lm, predicting_states(lm, packed), packed, rows)
        last, *states = predicting_states_of_layers(lm, packed, [-1, *(layer for layer, _ in self.layers)])
        hidden = self._hidden_loss(lm, states, rows)
        if not self.spec.logits:
            return hidden
        return self._logits_loss(lm, last, packed, rows).plus(hidden, self.settings.hidden_weight)

    def _compute_teacher_outputs(self, folder: Path) -> Path:
        return compute_teacher_outputs(self.teacher, self.units, self.spec, self._task, self.inference_tokens, folder)

    def _hidden_loss(self, lm: LanguageModel, states: Sequence[Tensor], rows: Sequence[int]) -> Loss:
        """Sums the distances of all pairs of layers."""
        projections = getattr(lm.model, _PROJECTION_MODULE, [None] * len(states))
        targets = self.teacher_outputs.layers(rows).unbind(1)
        # All have the same count, one a supervised token, so that the losses add.
        total, *losses = (
            distill_hidden(student, target, self.settings, projection=projection)
            for student, target, projection in zip(states, targets, projections, strict=True)
        )
        for loss in losses:
            total = total.plus(loss)
        return total

    def _logits_loss(self, lm: LanguageModel, states: Tensor, packed: Packed, rows: Sequence[int]) -> Loss:
        config: DistillationConfig = self.settings
        if config.top_k is not None:
            top = self.teacher_outputs.top(rows)

            def chunk_loss(student: Tensor, part: slice) -> Loss:
                return distill(student, top[part], config, targets=packed.targets[part])

        else:
            last = self.teacher_outputs.last(rows)

            def chunk_loss(student: Tensor, part: slice) -> Loss:
                teacher = self.head.logits(last[part])
                size = min(student.shape[-1], teacher.shape[-1])  # embeddings are padded; no token lies beyond
                return distill(student[:, :size], teacher[:, :size], config, targets=packed.targets[part])

        return join_losses(map_logits(lm, states, chunk_loss))


def _check_layer(layer: int, depth: int, model: str) -> None:
    if not -depth - 1 <= layer <= depth:
        raise UserError(f"the {model} has {depth} layers, and no layer {layer}", where="train.objective.layers")


def _teacher_config(folder: Path, tokenizer: Any) -> Any:
    """The config of a teacher's text model, if it reads what the student reads."""
    config = load_config(str(folder), f"no teacher ({TEACHER_KEY})")
    teacher_tokens = load_tokenizer(str(folder), f"no teacher ({TEACHER_KEY})").get_vocab()
    # The ids themselves: distributions are compared token by token.
    if teacher_tokens != tokenizer.get_vocab():
        fix = "take a teacher with the student's tokenizer"
        raise UserError(f"`{folder}` has another tokenizer than the student", where=TEACHER_KEY, fix=fix)
    return config.get_text_config()
