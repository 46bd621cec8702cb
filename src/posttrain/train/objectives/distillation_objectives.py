"""Lessons from a teacher: its next-token distributions, its hidden states, or both."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from posttrain.models.head import map_logits
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, predicting_states, predicting_states_of_layers
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.config import HiddenConfig
from posttrain.train.objectives.distillation import distill, distill_hidden
from posttrain.train.objectives.log_probs import SftObjective
from posttrain.train.objectives.loss import Loss, join_losses
from posttrain.train.objectives.teacher import TeacherOutputs, TeacherSpec, compute_teacher_outputs, load_head

_PROJECTION_MODULE = "distillation_projections"


class Distillation(SftObjective):
    """What both lessons share; like supervised fine-tuning they count every supervised token alike.

    Args:
        units: one sequence each.
        lm: the student, of which tokenizer and sizes are noted, and nothing is kept.
        hidden: how hidden states are compared, if they are.
        logits: whether distributions are.

    Raises:
        UserError: there is no teacher, it has another tokenizer, or a layer that is named is not there.
    """

    has_teacher = True

    def __init__(
        self, units: Sequence[Unit], config: TrainConfig, lm: LanguageModel, hidden: HiddenConfig | None, logits: bool
    ) -> None:
        super().__init__(units, config)
        self.teacher = Path(config.with_teacher_from(Path()).distill.teacher or "")
        teacher = _teacher_config(self.teacher, lm.tokenizer)
        student = lm.model.config.get_text_config()
        self.hidden, self._task = hidden, lm.task
        where = "train.distill.hidden.layers" if logits else "train.distill_hidden.layers"
        for mine, theirs in hidden.layers if hidden else []:
            _check_layer(mine, student.num_hidden_layers, "student", where)
            _check_layer(theirs, teacher.num_hidden_layers, "teacher", where)
        self._widths = student.hidden_size, teacher.hidden_size
        self.wanted = TeacherSpec(
            logits=logits,
            top_k=config.distill.top_k if logits else None,
            temperature=config.distill.temperature,
            vocabulary=student.vocab_size,
            layers=[theirs for _, theirs in hidden.layers] if hidden else [],
            dtype=config.dtype,
        )

    def cache_teacher_outputs(self, folder: Path) -> None:
        self._ask(folder)

    @contextmanager
    def attach_modules(self, lm: LanguageModel) -> Iterator[None]:
        """The student with a projection for each pair of layers, where the teacher's states have another width."""
        mine, theirs = self._widths
        if self.hidden is None or mine == theirs:
            yield
            return
        like = next(lm.model.parameters())
        projections = nn.ModuleList(nn.Linear(mine, theirs, bias=False) for _ in self.hidden.layers)
        lm.model.add_module(_PROJECTION_MODULE, projections.to(like.device, like.dtype))
        try:
            yield
        finally:
            delattr(lm.model, _PROJECTION_MODULE)

    def prepare(self, lm: LanguageModel, folder: Path, *, padded: bool, parts: Iterable[Sequence[int]] = ()) -> None:
        """Open what the teacher has said; it is asked now only if nobody called ``consult`` before."""
        kept = self._ask(folder)
        self.teaching = TeacherOutputs(kept, self.units, self.wanted, lm.device)
        if self.wanted.logits and self.wanted.top_k is None:
            self.head = load_head(kept, self.teacher, lm)

    def _ask(self, folder: Path) -> Path:
        return compute_teacher_outputs(self.teacher, self.units, self.wanted, self._task, self.tokens_at_once, folder)

    def _hidden_loss(
        self, lm: LanguageModel, states: Sequence[Tensor], rows: Sequence[int], config: HiddenConfig
    ) -> Loss:
        """The distances of all pairs of layers, added up."""
        projections = getattr(lm.model, _PROJECTION_MODULE, [None] * len(states))
        taught = self.teaching.layers(rows).unbind(1)
        first, *others = (
            distill_hidden(mine, theirs, config, projection=projection)
            for mine, theirs, projection in zip(states, taught, projections, strict=True)
        )
        for other in others:
            first = first.plus(other)
        return first


class LogitDistillation(Distillation):
    """``distill``: the teacher's next-token distributions, and with ``hidden`` its hidden states as well."""

    def __init__(self, units: Sequence[Unit], config: TrainConfig, lm: LanguageModel) -> None:
        super().__init__(units, config, lm, config.distill.hidden, logits=True)

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        if self.hidden is None:
            return self._logits_loss(lm, predicting_states(lm, packed), packed, rows)
        last, *states = predicting_states_of_layers(lm, packed, [-1, *(mine for mine, _ in self.hidden.layers)])
        loss = self._logits_loss(lm, last, packed, rows)
        return loss.plus(self._hidden_loss(lm, states, rows, self.hidden), self.hidden.weight)

    def _logits_loss(self, lm: LanguageModel, states: Tensor, packed: Packed, rows: Sequence[int]) -> Loss:
        config = self.config.distill
        if config.top_k is not None:
            top = self.teaching.top(rows)

            def of(student: Tensor, part: slice) -> Loss:
                return distill(student, top[part], config, targets=packed.targets[part])

        else:
            last = self.teaching.last(rows)

            def of(student: Tensor, part: slice) -> Loss:
                teacher = self.head.logits(last[part])
                words = min(student.shape[-1], teacher.shape[-1])  # beyond them stand no tokens
                return distill(student[:, :words], teacher[:, :words], config, targets=packed.targets[part])

        return join_losses(map_logits(lm, states, of))


class HiddenDistillation(Distillation):
    """``distill_hidden``: the teacher's hidden states."""

    def __init__(self, units: Sequence[Unit], config: TrainConfig, lm: LanguageModel) -> None:
        self.compared = config.distill_hidden
        super().__init__(units, config, lm, self.compared, logits=False)

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        states = predicting_states_of_layers(lm, packed, [mine for mine, _ in self.compared.layers])
        return self._hidden_loss(lm, states, rows, self.compared)


def _check_layer(layer: int, depth: int, whose: str, where: str) -> None:
    if not -depth - 1 <= layer <= depth:
        raise UserError(f"the {whose} has {depth} layers, and no layer {layer}", where=where)


def _teacher_config(folder: Path, tokenizer: Any) -> Any:
    """The config of a teacher's text model, if it reads what the student reads."""
    from transformers import AutoConfig, AutoTokenizer

    where = "train.distill.teacher"
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab()
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"no teacher: {str(error).splitlines()[0]}", where=where) from None
    if theirs != tokenizer.get_vocab():
        fix = "take a teacher with the student's tokenizer"
        raise UserError(f"`{folder}` has another tokenizer than the student", where=where, fix=fix)
    return config.get_text_config()
