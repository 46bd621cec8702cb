"""The champion as something whose training records can be held to account: which parameters count, which records."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from posttrain.loop.turn import Turn
from posttrain.store.errors import UserError
from posttrain.store.records import Run
from posttrain.train.config import LoraConfig
from posttrain.train.objectives.registry import OBJECTIVES

if TYPE_CHECKING:
    from posttrain.models.chat import Encoded
    from posttrain.models.language_model import LanguageModel

_ADAPTER = "adapter"
_RANK = 8
_LAYERS = 4


@dataclass(frozen=True)
class Trained:
    """How a model came about.

    Attributes:
        model: its id.
        run: the training.
    """

    model: str
    run: Run

    @property
    def dataset(self) -> str:
        """The id of its training set."""
        return self.run.inputs["dataset"]

    @property
    def train(self) -> dict[str, Any]:
        """The settings that it was trained with."""
        settings: dict[str, Any] = self.run.config["train"]
        return settings


def training_of(turn: Turn, model: str) -> Trained | None:
    """The training that made a model; None of a base model.

    Raises:
        UserError: its objective is not to learn answers.
    """
    runs = [run for run in turn.workspace.metadata.producers(model) if run.stage == "train" and run.status == "done"]
    if not runs:
        return None
    found = Trained(model, runs[-1])
    if OBJECTIVES[found.train["objective"]].shape not in ("completion", "teacher"):
        raise UserError(
            f"the champion was trained by `{found.train['objective']}`, and influence is of answers that are learned",
            where="train.objective",
        )
    return found


def load(turn: Turn, trained: Trained) -> "tuple[LanguageModel, str]":
    """The model in float32 with the parameters that count requiring a gradient, and what these are, in words.

    Of a model that an adapter was trained for it is that adapter. Of any other the linear layers count, each weight
    matrix seen through a random projection of its inputs to 8 dimensions: a fresh adapter whose second half, which is
    zero, requires the gradient. So inner products of gradients are kept up to noise (as in LoGra, S. Choe et al. 2024,
    arXiv:2405.13954), at a hundredth of the numbers. Of a deep model only the last decoder layers count, as in TracIn
    (G. Pruthi et al. 2020, arXiv:2002.08484, section 3.5): no gradient goes further back then.
    """
    import torch

    from posttrain.models.language_model import load as load_model
    from posttrain.select.value.influence.causal import with_saved_adapter
    from posttrain.train.lora import adapt

    adapter = turn.path(trained.model) / _ADAPTER
    if (adapter / "adapter_model.safetensors").is_file():
        base = load_model(turn.path(trained.run.inputs["source"]), turn.config.task, "float32")
        lm, what, part = with_saved_adapter(base, adapter), "the adapter that was trained", "lora_"
    else:
        whole = load_model(turn.path(trained.model), turn.config.task, "float32")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            lm = adapt(whole, LoraConfig(rank=_RANK, alpha=_RANK))
        what, part = f"linear layers, their inputs projected at random to {_RANK} dimensions", "lora_B"
    lm.model.eval()
    last, depth = _last_layers([name for name, _ in lm.model.named_parameters() if part in name])
    for name, value in lm.model.named_parameters():
        value.requires_grad_(name in last)
    return lm, what if depth <= _LAYERS else f"{what}, in the last {_LAYERS} of {depth} layers"


def _last_layers(names: list[str]) -> tuple[set[str], int]:
    """The parameters of the last `_LAYERS` of a model's numbered layers, and how many layers there are."""
    numbers = [next((int(word) for word in name.split(".") if word.isdecimal()), 0) for name in names]
    depth = max(numbers) + 1
    return {name for name, number in zip(names, numbers, strict=True) if number >= depth - _LAYERS}, depth


def encoded(lm: "LanguageModel", trained: Trained, records: pa.Table) -> "list[Encoded]":
    """The training records as the training met them."""
    from posttrain.train.examples import examples

    return [one.unit[0] for one in examples(lm, records, trained.train["max_length"], "completion")]
