"""TensorBoard's event files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.store.files import make_folder, writing
from posttrain.train.watch.findings import Decision
from posttrain.train.watch.sinks.base import optional
from posttrain.train.watch.values import StepValues


class TensorBoard:
    """Scalars by step, decisions as text; steps that were trained again hide those of before.

    Raises:
        UserError: tensorboard is not installed, or the disk refused.
    """

    def __init__(self, folder: Path) -> None:
        self._library = optional("torch.utils.tensorboard", "tensorboard", "train.sinks.tensorboard")
        self._folder = folder
        make_folder(folder)
        self._open(None)

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        for name, number in values.numbers().items():
            self._writer.add_scalar(name, number, values.step)
        for decision in decisions:
            self._writer.add_text("decisions", decision.line(), values.step)

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        self._writer.close()
        self._open(len(steps))

    def close(self) -> None:
        self._writer.close()

    def _open(self, step: int | None) -> None:
        with writing(self._folder):
            self._writer = self._library.SummaryWriter(str(self._folder), purge_step=step)
