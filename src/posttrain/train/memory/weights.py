"""A model's weights as training holds them: names, shapes, what they are and which are trained."""

import math
from dataclasses import dataclass
from typing import Any

from posttrain.models.shape import Shape, shape, skeleton
from posttrain.train.config import TrainConfig
from posttrain.train.lora import with_adapter
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.optimizers.groups import Kind, places


@dataclass(frozen=True)
class Weight:
    """One parameter. A tied head is an embedding and counted once."""

    name: str
    kind: Kind
    depth: int | None
    shape: tuple[int, ...]
    trained: bool

    @property
    def adapter(self) -> bool:
        """Whether it is LoRA's."""
        return ".lora_" in self.name

    @property
    def count(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Blueprint:
    """All that a model's config says about the memory it takes.

    Args:
        shape: its sizes.
        weights: its parameters, an adapter's too.
    """

    shape: Shape
    weights: tuple[Weight, ...]

    @classmethod
    def of(cls, config: Any, train: TrainConfig) -> "Blueprint":
        """From a transformers config, as `train` has it trained.

        Raises:
            UserError: no model of this kind has this config, or LoRA does not find what it is to adapt.
        """
        classifier = OBJECTIVES[train.objective].output in ("reward", "classes")
        model = skeleton(config, classifier=classifier)
        return cls.of_model(
            with_adapter(model, train.lora, low_cpu_mem_usage=True) if train.method == "lora" else model
        )

    @classmethod
    def of_model(cls, model: Any) -> "Blueprint":
        """From a model as it is trained, its adapter on it; one on the ``meta`` device will do."""
        where = places(model)
        return cls(
            shape(model),
            tuple(
                Weight(name, *where[name], tuple(weight.shape), weight.requires_grad)
                for name, weight in model.named_parameters()
            ),
        )

    def count(self, *kinds: Kind, trained: bool = False) -> int:
        """Numbers in the weights of these kinds, or of all, and only in those that are trained if asked for."""
        return sum(
            one.count for one in self.weights if (not kinds or one.kind in kinds) and (one.trained or not trained)
        )

    def table(self) -> dict[str, int]:
        """Numbers by kind, of adapters, and of all that is trained."""
        kinds = dict.fromkeys(one.kind for one in self.weights if not one.adapter)
        return {
            **{kind: sum(one.count for one in self.weights if one.kind == kind and not one.adapter) for kind in kinds},
            "adapter": sum(one.count for one in self.weights if one.adapter),
            "trained": self.count(trained=True),
        }
